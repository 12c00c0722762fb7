"""The report: one self-contained page of a finished run, rendered outside DVC because it holds times and versions."""
