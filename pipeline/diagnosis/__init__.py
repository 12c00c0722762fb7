"""The debugging ladder: every beat of the loop computed a second time, a few short runs, and a verdict in words."""
