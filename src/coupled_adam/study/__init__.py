"""Studies: a grid of trainings from one TOML file, run and evaluated, one result file per run."""
