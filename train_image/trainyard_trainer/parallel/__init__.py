"""Process groups and the strategies that distribute a model over them: DDP, FSDP2, DeepSpeed."""
