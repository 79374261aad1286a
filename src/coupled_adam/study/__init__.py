"""Studies: a grid of trainings from one TOML file, their evaluation, statistics, tables, figures and report."""
