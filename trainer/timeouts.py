"""Defines how long one part of a run waits for another. `trainer.timeout_s` is the user's own limit.

Pauses of at most 0.1 s in loops that poll this machine are written where they are used, not here.
"""

# Ranks, launcher and supervisor.
FIRST_RANK_S = 5.0  # until the first rank of a node has printed an error that all ranks may have
LAUNCHER_S = 8.0  # until the launcher has reported the peer that failed, and ends this rank
INTERRUPT_S = 60.0  # until the ranks of `launch` have written a checkpoint after an interrupt; a second kills them
PEERS_S = 5.0  # until the peers of a failed rank have exited by themselves
PASS_S = 30.0  # until ranks whose passes depend on each other have finished theirs, after one has failed
STACKS_S = 1.0  # until ranks have written their stacks; then they are killed
START_S = 60.0  # until ranks have loaded and planned, plus PLANNING times the launcher's planning time
PLANNING = 10.0
STILL = 2.0  # times `trainer.timeout_s` without a heartbeat; by then any collective would have timed out
SUSPENDED_S = 5.0  # if two polls of the supervisor are further apart, it was suspended
COMPILE_S = 1800.0  # extra seconds for compiling a graph, in addition to STILL
AWAY_S = 10.0  # the shortest pause before a restart after unavailable data
LONGEST_PAUSE_S = 30.0  # the longest pause before any other restart
MONITOR_S = 1.0  # until the thread of gpu_monitor has ended; a GPU that is lost may never answer
TICK_S = 1.0  # the longest interval at which a rank checks its own heartbeats
BASELINE_S = 0.3  # for which the machine is observed before a bench measures anything
COLLECTIVE_S = 600.0  # limit of a collective in a tool

# Checkpoints and files.
REREADS_S = (0.2, 1.0)  # pauses before an unreadable file of a checkpoint is read again
VISIBLE_S = 70.0  # NFS caches the entries of a folder, and missing ones, for up to 60 s
VISIBLE_EVERY_S = 0.5  # interval at which such a folder is polled
EXPORT_S = 86400.0  # extra seconds for a recipe's export: practically without a limit
ABANDONED_S = 3600.0  # after which nobody writes to a temporary file any more

# Data.
FORK_S = 30.0  # limit until forked processes run Python code
READ_S = 30.0  # limit of the wait for a disk: a network drive may be away for a while
READ_PAUSE_S = 3.0  # the longest pause before another read
IDLE_S = 10.0  # an unused shard is closed after this time, since an open one can't leave the cache
SERVER_S = 30.0  # limit of the wait for the next byte of a server or a program
SERVER_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)  # before another try, by the number of tries without a new byte
DOWNLOAD_S = 300.0  # limit of the wait for a new byte of a shard that is indexed; less than trainer.timeout_s
FIRST_DOWNLOAD_S = 30.0  # the same for a shard that is not indexed: its URL may be wrong
AHEAD_S = 1.0  # the same for a download ahead of use
SPARE_S = 5.0  # a download ahead of use evicts no shard that was used within this time
LOOK_S = 0.2  # interval at which the prefetching process checks the progress of training
AGAIN_S = 5.0  # pause after a failed download ahead of use; nobody waits for the shard yet

# trainer.tools.doctor.
MEET_S = 30.0  # until a rank connects, and until it answers; --timeout changes it
TOPOLOGY_S = 10.0  # until nvidia-smi has printed the matrix of links
GPUS_S = 20.0  # until the driver and torch have answered about all GPUs; some drivers load for seconds
DISK_S = 2.0  # until a disk has written and read back a small file
SKEW_S = 0.5  # difference between the clocks of two machines above which there is a warning

# Loggers whose server may be away.
LOGGER_S = 10.0  # at the end of a run, until pending numbers are sent
LOGGER_PAUSE_S = 2.0  # before a retry

# Lines on the terminal.
LOG_EVERY_S = 10.0  # between two lines about a long validation
REFRESH_S = 0.1  # between two redraws of the bar
PANEL_S = 0.5  # between two redraws in a notebook

# Search for a faster config.
TRIAL_PEERS_S = 2.0  # until the peers of a failed rank have reported their own failure
TRIAL_RESERVE_S = 60.0  # beyond a trial's own limit, until the processes of other machines have reported
TRIAL_LEAST_S = 60.0  # smallest limit of a trial
