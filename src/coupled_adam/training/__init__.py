"""Training language models: config, schedule, trainer, parallelism, checkpoints, live monitor."""
