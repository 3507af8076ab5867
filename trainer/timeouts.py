"""How long ranks, their launcher and their supervisor wait for each other. `trainer.timeout_s` is the user's own."""

FIRST_RANK_S = 5.0  # the first rank of a node prints an error that all may have, and ends the others
LAUNCHER_S = 8.0  # a launcher tells of the peer that failed, and ends this rank
PEERS_S = 5.0  # the peers of a failed rank end by themselves
STACKS_S = 1.0  # ranks write their stacks before they are killed
REAP_S = 5.0  # the fork server tells of a rank that has ended
START_S = 60.0  # ranks load and plan; added to PLANNING times what planning took the launcher
PLANNING = 10.0
STILL = 2.0  # times `trainer.timeout_s`: no rank has moved, and no collective will time out any more
SUSPENDED_S = 5.0  # between two looks of the supervisor: it was suspended, and its ranks with it
AWAY_S = 10.0  # the shortest pause before a restart for data that was away
LONGEST_PAUSE_S = 30.0  # before any other restart
