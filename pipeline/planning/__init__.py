"""How much memory a stage will take, from shapes alone: the real code runs on tensors that have no storage."""
