"""Tracking that cannot hurt: everything for MLflow is on disk first, and a thread delivers it. See docs/tracking.md."""
