"""Examines the machines of a run before it starts: what they have, what differs between ranks, what would fail."""
