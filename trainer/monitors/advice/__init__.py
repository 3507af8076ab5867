"""Advice on a run's speed: thresholds of tuning guides, and the setting that fixes each."""
