"""Rules that read a stage's figures and say in plain words what is wrong, why, and what to change. docs/health.md lists them.

Nothing here can change a stage's output: rules read rows of numbers and give text.
"""
