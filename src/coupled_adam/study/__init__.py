"""Studies: a grid of training runs from one TOML file, trained and evaluated, one result file per run."""
