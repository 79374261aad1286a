"""`anneal` given as a share refers to all steps of the run, including the last."""

from coupled_adam.config.run_config import load_config


def test_anneal_over_the_whole_run_reaches_its_end_after_the_last_step() -> None:
    changes = ["optimizer.row_exponent=0.25", "optimizer.row_exponent_start=1.0", 'optimizer.anneal="100%"']
    config = load_config("tiny", changes)
    assert config.anneal_steps == config.total_steps
    last, after = config.row_exponent(config.total_steps - 1), config.row_exponent(config.total_steps)
    assert last is not None
    assert last > 0.25
    assert after == 0.25
