"""Reward functions of your own; DVC reruns stage ppo when a file here changes. docs/rewards.md says how."""
