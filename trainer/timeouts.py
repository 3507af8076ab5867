"""The time that ranks, launcher and supervisor wait for each other. `trainer.timeout_s` is the user's own limit."""

FIRST_RANK_S = 5.0  # until the first rank of a node has printed an error that all may have, and its end ends the others
LAUNCHER_S = 8.0  # until the launcher has reported the peer that failed, and ends this rank
PEERS_S = 5.0  # until the peers of a failed rank have ended by themselves
STACKS_S = 1.0  # until ranks have written their stacks; then they are killed
START_S = 60.0  # until ranks have loaded and planned, beside PLANNING times the launcher's planning time
PLANNING = 10.0
STILL = 2.0  # times `trainer.timeout_s` without a beat: then no collective will time out any more
SUSPENDED_S = 5.0  # between two looks of the supervisor; if they are further apart, it was suspended
AWAY_S = 10.0  # the shortest pause before a restart after unavailable data
LONGEST_PAUSE_S = 30.0  # the longest pause before any other restart
