"""params.yaml as frozen, typed, range-checked objects, one module per section.

This file imports nothing, so that a stage depends only on the sections it reads.
"""
