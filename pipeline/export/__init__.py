"""What a run has learnt, as folders that plain PEFT and plain transformers load: `make export`, docs/export.md."""
