"""What is minimised: pure functions from tensors to SUMS with their term counts; `update` divides once."""
