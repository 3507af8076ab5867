"""Examines the machines of a run before it starts: what is there, what differs between ranks, what would break."""
