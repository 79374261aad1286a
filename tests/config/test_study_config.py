"""The study file: the built-in grids compared with the paper, names and hashes of runs, and mistakes."""

import re
from pathlib import Path
from typing import Any

import pytest

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import read_toml
from coupled_adam.config import loading
from coupled_adam.config.builtin_files import STUDIES, preset_text, study_text
from coupled_adam.config.loading import parse_settings
from coupled_adam.config.run_config import Config, differences, load_config, to_toml
from coupled_adam.config.study_config import Study, load_study, parse_study, with_override, with_settings
from coupled_adam.study.config_hash import config_hash
from coupled_adam.study.expansion import Cell, cells_of, chosen

# Tab. model_sizes and Sec. experiments of the paper: lr, heads, layers, width.
SIZES = {
    "125M": (6.0e-4, 12, 12, 768),
    "355M": (3.0e-4, 16, 24, 1024),
    "760M": (2.5e-4, 16, 24, 1536),
    "1.3B": (2.0e-4, 32, 24, 2048),
    "2.6B": (1.6e-4, 32, 32, 2560),
}
B = 10**9

SMALL = """
name = "mine"
title = "Mine"
base = "tiny"
seeds = [1, 2]
[[optimizers]]
embeddings = "adamw"
[[optimizers]]
embeddings = "coupled"
"""


def cells(text: str, *overrides: str) -> list[Cell]:
    return cells_of(parse_study(text, "mine.toml", Path()), parse_settings(overrides, Config))


def shipped(name: str) -> list[Cell]:
    return cells_of(load_study(name))


def grid(found: list[Cell]) -> set[tuple[str, int]]:
    """The pairs (N, D)."""
    return {(cell.model, cell.config.training.tokens) for cell in found}


def test_small_scale_has_the_papers_grid() -> None:
    found = shipped("paper-small-scale")
    assert len(found) == 3 * 3 * 2 * 3
    assert grid(found) == {(N, D * B) for N in ("125M", "355M", "760M") for D in (5, 10, 20)}
    assert {cell.optimizer for cell in found} == {"standard", "coupled"}
    assert {cell.seed for cell in found} == {1, 2, 3}
    assert {cell.config.data.source for cell in found} == {"openwebtext"}


def test_large_scale_is_four_pairs_with_one_seed() -> None:
    found = shipped("paper-large-scale")
    assert len(found) == 8
    assert grid(found) == {("1.3B", 26 * B), ("1.3B", 105 * B), ("2.6B", 52 * B), ("2.6B", 210 * B)}
    assert {cell.seed for cell in found} == {1}
    assert {cell.config.data.source for cell in found} == {"slimpajama"}


def test_scaled_has_eleven_exponents_at_three_data_sizes() -> None:
    found = shipped("paper-scaled")
    assert len(found) == 11 * 3 * 3
    assert {cell.config.optimizer.scale_exponent for cell in found} == set(range(-5, 6))
    assert grid(found) == {("125M", D * B) for D in (5, 10, 20)}
    names = {cell.config.optimizer.scale_exponent: cell.optimizer for cell in found}
    assert (names[-5], names[0], names[2]) == ("coupled n=-5", "coupled", "coupled n=2")


def test_sgd_searches_six_factors_with_all_seeds_next_to_both_adams() -> None:
    found = shipped("paper-sgd")
    assert len(found) == (6 + 2) * 3 * 3
    sgd = [cell for cell in found if cell.config.optimizer.embeddings == "sgd"]
    assert {cell.config.optimizer.sgd_factor for cell in sgd} == {100, 200, 300, 400, 500, 600}
    assert {cell.config.optimizer.sgd_momentum for cell in sgd} == {0.9}
    assert {cell.optimizer for cell in found} - {cell.optimizer for cell in sgd} == {"standard", "coupled"}


@pytest.mark.parametrize("name", [name for name in STUDIES if name.startswith("paper")])
def test_hyperparameters_match_the_paper(name: str) -> None:
    for cell in shipped(name):
        model, optimizer, schedule = cell.config.model, cell.config.optimizer, cell.config.schedule
        assert (optimizer.lr, model.heads, model.layers, model.width) == SIZES[cell.model]
        assert (optimizer.beta1, optimizer.beta2, optimizer.eps) == (0.9, 0.95, 1e-8)
        assert (optimizer.weight_decay, optimizer.max_grad_norm, model.tied) == (0.1, 1.0, True)
        assert (schedule.kind, schedule.final_fraction, cell.config.rows) == ("cosine", 0.1, 50304)
        is_large = cell.model in ("1.3B", "2.6B")
        assert (model.context, cell.config.training.batch_size) == ((2048, 256) if is_large else (1024, 96))
        assert schedule.warmup == ("1%" if is_large else 100)
        assert cell.config.training.precision == "bf16"


def test_demo_and_single_gpu_are_as_described() -> None:
    found = shipped("demo")
    assert len(found) == 6
    for cell in found:
        model = cell.config.model
        assert (model.layers, model.width, model.context, cell.config.rows) == (2, 64, 64, 4096)
        assert (cell.config.optimizer.lr, cell.config.total_steps, cell.config.tokens_per_step) == (3e-3, 300, 1024)
        assert (cell.config.data.source, cell.config.data.tokenizer) == ("python-docs", "bpe:4096")
    found = shipped("single-gpu")
    assert len(found) == 12
    assert {cell.config.training.tokens for cell in found} == {82_000_000, 262_000_000}
    for cell in found:
        model = cell.config.model
        assert (model.layers, model.width, model.context, cell.config.rows) == (6, 384, 1024, 50304)
        assert (cell.config.optimizer.lr, cell.config.training.batch_size) == (1e-3, 16)


def test_untied_heads_couple_each_table_and_both() -> None:
    found = shipped("untied-heads")
    kinds = {(cell.config.model.tied, cell.config.optimizer.embeddings, cell.config.optimizer.couple) for cell in found}
    assert kinds == {
        (True, "adamw", "output"),
        (True, "coupled", "output"),
        (False, "adamw", "output"),
        (False, "coupled", "output"),
        (False, "coupled", "input"),
        (False, "coupled", "all"),
    }


def test_single_gpu_125m_is_the_papers_smallest_model_in_a_short_run() -> None:
    found = shipped("single-gpu-125m")
    assert grid(found) == {("125M", 250_000_000)}
    longer_memory = ("standard b2=0.99", "standard b1=0 b2=0.99", "factored mean-free b1=0 b2=0.99")
    names = ("standard", "coupled", "partial y=0.25 mean-free", *longer_memory)
    assert {(cell.optimizer, cell.seed) for cell in found} == {(o, s) for o in names for s in (1, 2, 3)}
    assert {cell.optimizer for cell in found if cell.config.optimizer.tables.beta2 == 0.99} == set(longer_memory)
    paper = next(cell.config.model for cell in shipped("paper-small-scale") if cell.model == "125M")
    for cell in found:
        assert cell.config.model == paper
        assert (cell.config.total_steps, cell.config.tokens_per_step) == (7629, 32 * 1024)


def test_single_gpu_scaled_has_five_exponents_and_the_standard() -> None:
    found = shipped("single-gpu-scaled")
    assert grid(found) == {("30M", 262_000_000)}
    assert {cell.seed for cell in found} == {1, 2, 3}
    kinds = {(cell.optimizer, cell.config.optimizer.embeddings, cell.config.optimizer.scale_exponent) for cell in found}
    scaled = {("coupled" if n == 0 else f"coupled n={n}", "coupled", n) for n in (-4, -2, 0, 2, 4)}
    assert kinds == scaled | {("standard", "adamw", 0)}


def test_centring_differs_from_the_standard_only_in_the_mean() -> None:
    found = shipped("centring")
    assert grid(found) == {("30M", 82_000_000), ("30M", 262_000_000)}
    assert {cell.seed for cell in found} == {1, 2, 3}
    by_label = {cell.label: cell.config for cell in found}
    centred = {label: config for label, config in by_label.items() if "-centred/" in label}
    assert len(centred) == 6
    for label, config in centred.items():
        assert differences(by_label[label.replace("-centred", "")], config) == ["name", "optimizer.centre"]


@pytest.mark.parametrize(("name", "count"), [("centring", 12), ("single-gpu-scaled", 6)])
def test_runs_shared_with_single_gpu_are_identical(name: str, count: int) -> None:
    there = {cell.label: cell.config_hash for cell in shipped("single-gpu")}
    shared = [cell for cell in shipped(name) if cell.label in there]
    assert len(shared) == count
    assert all(cell.config_hash == there[cell.label] for cell in shared)
    assert not {cell.config_hash for cell in shipped(name) if cell not in shared} & set(there.values())


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_written_as_toml_is_read_back_equal(name: str) -> None:
    study = load_study(name)
    assert parse_study(to_toml(study), "copy", Path()) == study
    assert [cell.config_hash for cell in cells_of(parse_study(to_toml(study), "copy", Path()))] == [
        cell.config_hash for cell in cells_of(study)
    ]


def test_a_written_study_keeps_quotes_lists_and_overrides() -> None:
    text = SMALL.replace('title = "Mine"', r'title = "a \"b\" \\ c"').replace("seeds = [1, 2]", "seeds = 7")
    text += 'scale_exponent = [0, 1.5]\nset = { "optimizer.beta2" = 0.99 }\n[override]\nlog.every = 3\n'
    study = parse_study(text, "mine.toml", Path())
    assert parse_study(to_toml(study), "copy", Path()) == study
    assert study.override == {"log.every": 3}
    assert study.seeds == [7]


def test_names_of_runs_are_valid_folders_and_do_not_depend_on_other_cells() -> None:
    before = [cell.label for cell in cells(SMALL)]
    assert before[0] == "tiny-307.2k-standard/seed-1"
    after = [cell.label for cell in cells(SMALL.replace("[1, 2]", "[9, 1, 2]") + "scale_exponent = [-2, 0, 0.5]\n")]
    assert set(before) < set(after)
    assert "tiny-307.2k-coupled-n-2/seed-9" in after
    for cell in [cell for name in STUDIES for cell in shipped(name)]:
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", cell.id), cell.id
        assert cell.run == Path("runs") / cell.id / f"seed-{cell.seed}"


def test_settings_apply_in_the_order_study_model_tokens_optimizer_override_command_line() -> None:
    text = """
name = "order"
title = "Order"
base = "tiny"
seeds = 1
tokens = ["200k"]
set = { "optimizer.lr" = 1, "optimizer.beta1" = 0.1, "optimizer.beta2" = 0.1, "optimizer.eps" = 0.1, "log.every" = 1 }
override = { "log.every" = 5 }
[[models]]
name = "m"
set = { "optimizer.beta1" = 0.2, "optimizer.beta2" = 0.2, "optimizer.eps" = 0.2 }
[[optimizers]]
embeddings = "coupled"
set = { "optimizer.beta2" = 0.3, "optimizer.eps" = 0.3, "log.every" = 3 }
"""
    (cell,) = cells(text, "optimizer.eps=0.4")
    optimizer = cell.config.optimizer
    assert (optimizer.lr, optimizer.beta1, optimizer.beta2, optimizer.eps) == (1.0, 0.2, 0.3, 0.4)
    assert (cell.config.log.every, cell.config.training.tokens) == (5, 200_000)
    assert cell.config.name == "order-m-200k-coupled"


def test_dotted_keys_and_tables_mean_the_same() -> None:
    quoted = SMALL.replace("[[optimizers]]", '[set]\n"optimizer.lr" = 0.5\n[[optimizers]]', 1)
    nested = SMALL.replace("[[optimizers]]", "[set]\noptimizer.lr = 0.5\n[[optimizers]]", 1)
    assert cells(quoted) == cells(nested)
    assert cells(quoted)[0].config.optimizer.lr == 0.5


def test_a_base_file_is_found_from_the_study_file(tmp_path: Path) -> None:
    (tmp_path / "bases").mkdir()
    (tmp_path / "bases" / "own.toml").write_text(
        'name = "own"\n[model]\nlayers = 1\nheads = 1\nwidth = 8\ncontext = 8\nvocabulary_size = 64\n'
        '[data]\nfolder = "data"\n[optimizer]\nlr = 1e-2\n[training]\ntokens = 800\nbatch_size = 4\n'
    )
    (tmp_path / "mine.toml").write_text(SMALL.replace('"tiny"', '"bases/own.toml"'))
    found = cells_of(load_study(str(tmp_path / "mine.toml")))
    assert found[0].label == "own-800-standard/seed-1"


HASH = {
    "seed=2": True,
    "optimizer.lr=0.1": True,
    "model.width=32": True,
    "training.tokens=100k": True,
    "training.precision=bf16": True,
    "data.source=openwebtext": True,
    "name=other": False,
    "log.every=3": False,
    "checkpoints.every=3": False,
    "training.threads=2": False,
    "training.device=cpu": False,
    "data.folder=elsewhere": False,
}


@pytest.mark.parametrize(("change", "matters"), HASH.items())
def test_the_hash_depends_only_on_settings_that_affect_the_results(change: str, matters: bool) -> None:
    other = load_config("tiny", [change, *(["data.tokenizer=bpe:4096"] if "source" in change else [])])
    assert (config_hash(other) != config_hash(load_config("tiny"))) is matters


def test_without_a_source_the_name_of_the_folder_counts() -> None:
    one, same, other = (
        config_hash(load_config("tiny", ["data.source=none", f"data.folder={folder}"]))
        for folder in ("a/words", "b/words", "a/other")
    )
    assert one == same != other


def test_patterns_choose_cells_and_seeds() -> None:
    found = cells(SMALL)
    labels = lambda *patterns: [cell.label.removeprefix("tiny-307.2k-") for cell in chosen(found, patterns)]  # noqa: E731
    assert labels() == ["standard/seed-1", "standard/seed-2", "coupled/seed-1", "coupled/seed-2"]
    assert labels("*-coupled") == ["coupled/seed-1", "coupled/seed-2"]
    assert labels("*/seed-2") == ["standard/seed-2", "coupled/seed-2"]
    assert labels("*coupled/seed-2", "*standard/seed-1") == ["standard/seed-1", "coupled/seed-2"]
    with pytest.raises(ValueError, match=r"^--only coupled: .*tiny-307.2k-coupled"):
        labels("*-coupled", "coupled")


# A change to SMALL, and the words that each line of the message contains.
MISTAKES: dict[str, tuple[Any, list[str]]] = {
    "no TOML": (lambda text: text + "=", [r"^mine\.toml: .*TOML"]),
    "a missing key": (lambda text: text.replace('title = "Mine"', ""), [r"^mine\.toml: title (?!=)"]),
    "an unknown key": (lambda text: "seed = 1\n" + text, [r"^mine\.toml: seed: .*\bseeds\b"]),
    "a wrong name": (lambda text: text.replace('"mine"', '"a/b"'), [r'^mine\.toml: name = "a/b": ']),
    "no seeds": (lambda text: text.replace("[1, 2]", "[]"), [r"^mine\.toml: seeds = \[\]: "]),
    "a seed twice": (lambda text: text.replace("[1, 2]", "[1, 1]"), [r"^mine\.toml: seeds: 1\b"]),
    "tokens": (lambda text: 'tokens = ["5X"]\n' + text, [r'tokens = "5X": .*"5B"']),
    "no optimizers": (lambda text: text.split("[[")[0], [r"^mine\.toml: optimizers (?!=)"]),
    "an optimizer that is no table": (
        lambda text: text.split("[[")[0] + "optimizers = 3",
        [r"optimizers = 3: .*\[\[optimizers\]\]"],
    ),
    "a wrong optimizer": (
        lambda text: text.replace('"coupled"', '"couple"'),
        [r'\[\[optimizers\]\] number 2: embeddings = "couple": .*"adamw", "coupled" or "sgd"'],
    ),
    "two mistakes at once": (
        lambda text: text.replace('"coupled"', '"couple"\nfactor = 2').replace('"Mine"', "3"),
        ["number 2: embeddings = ", "number 2: factor: ", "title = 3: "],
    ),
    "a list of what is no table": (
        lambda text: "models = [3]\n" + text,
        [r"models = 3: .*\[\[models\]\].* name, base, tokens, set"],
    ),
    "a section that is a value": (
        lambda text: "report = 3\n" + text,
        [r"report = 3: .*\[report\].* lead, loss_note"],
    ),
    "mistakes in every part at once": (
        lambda text: text.replace('"coupled"', '"couple"') + "[[models]]\nnam = 3\n[slurm]\ngpus = 0\n",
        [
            r"\[\[models\]\] number 1: name ",
            r"\[\[models\]\] number 1: nam: .*\bname\b",
            r'\[\[optimizers\]\] number 2: embeddings = "couple"',
            r"slurm\.gpus = 0: ",
        ],
    ),
    "a model without name": (lambda text: text + "[[models]]\n", [r"\[\[models\]\] number 1: name (?!=)"]),
    "sgd without factor": (
        lambda text: text.replace('"coupled"', '"sgd"'),
        [r'\[\[optimizers\]\].*"sgd".* sgd_factor .*\b100\b.*\b600\b'],
    ),
    "an unknown evaluation": (
        lambda text: text + "[evaluation]\nlambada = true\n",
        [r"evaluation\.lambada: .*\btest_loss, .*\bmeasures, wordsim\b"],
    ),
    "a wrong base": (lambda text: text.replace('"tiny"', '"tony"'), [r"^study mine: .*tony"]),
    "an unknown setting": (
        lambda text: text + 'set = { "optimizer.lrr" = 1 }\n',
        [r"^study mine: optimizer\.lrr=1: .*optimizer\.lr\b.* \(tiny, coupled\)$"],
    ),
    "a wrong setting of all runs": (
        lambda text: text.replace("[[", "[set]\noptimizer.lr = -1\n[[", 1),
        [r"^study mine: optimizer\.lr = -1: .* \(tiny, standard and 1 other\)$"],
    ),
    "settings that contradict each other": (
        lambda text: text.replace('"adamw"', '"adamw"\nscale_exponent = 2'),
        [r'optimizer\.scale_exponent = 2\.0 .*optimizer\.embeddings = "adamw".* \(tiny, standard n=2\)$'],
    ),
    "two runs of one name": (
        lambda text: text + '[[optimizers]]\nembeddings = "coupled"',
        [r"^study mine: .*tiny-307\.2k-coupled/seed-1"],
    ),
}


@pytest.mark.parametrize(("change", "named"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named_with_its_key_and_what_is_expected(change: Any, named: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        cells(change(SMALL))
    assert [pattern for pattern in named if not re.search(pattern, str(caught.value), re.MULTILINE)] == []
    assert len(str(caught.value).splitlines()) == len(named)
    assert "--set" not in str(caught.value)


def test_a_mistake_on_the_command_line_says_so() -> None:
    with pytest.raises(UserError, match=r"--set optimizer.lrr=1: .*\boptimizer.lr\b"):
        cells(SMALL, "optimizer.lrr=1")


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("evaluation.lambada=true", r"^--set evaluation\.lambada=true: .*\btest_loss, "),
        ("evaluation.test_los=true", r"^--set evaluation\.test_los=true: .*\bevaluation\.test_loss\b"),
        ("slurm.gpus=0", r"^--set slurm\.gpus = 0: "),
        ("report=embeddings", r"^--set report=embeddings: .*\breport\.lead\b"),
        ("seeds=1", r"^--set seeds=1: .*--only"),
    ],
)
def test_a_wrong_setting_of_the_study_is_reported_like_that_of_a_run(setting: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        with_settings(load_study("demo"), [setting])


def test_text_on_the_command_line_that_looks_like_a_number_stays_text() -> None:
    study, left = with_settings(load_study("demo"), ["slurm.account=4_2", "data.folder=1_000", "name=0x10"])
    assert study.slurm.account == "4_2"
    kept = parse_study(to_toml(with_override(study, left)), "copy", Path())
    assert {cell.config.data.folder for cell in cells_of(study, left)} == {"1_000"}
    assert cells_of(kept) == cells_of(study, left)


def test_a_number_in_the_settings_of_a_study_is_text_if_the_key_expects_text() -> None:
    found = cells(SMALL.replace("[[", "[set]\ndata.folder = 2024\n[[", 1))
    assert {cell.config.data.folder for cell in found} == {"2024"}


def test_a_base_is_read_once_for_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.toml").write_text(preset_text("tiny"))
    (tmp_path / "mine.toml").write_text(SMALL.replace('"tiny"', '"own.toml"'))
    study = load_study(str(tmp_path / "mine.toml"))
    read: list[Path] = []
    monkeypatch.setattr(loading, "read_toml", lambda path: read.append(path) or read_toml(path))
    assert len(cells_of(study)) == 4
    assert read == [tmp_path / "own.toml"]


def test_a_seed_on_the_command_line_is_refused_because_run_names_would_clash() -> None:
    with pytest.raises(UserError, match=r"tiny-307.2k-standard/seed-5.* --only"):
        cells(SMALL, "seed=5")


def test_a_written_study_explains_its_keys() -> None:
    lines = to_toml(load_study("single-gpu")).splitlines()
    for key in ("name", "title", "base", "seeds", "tokens"):
        place = next(number for number, line in enumerate(lines) if line.startswith(f"{key} = "))
        assert lines[place - 1] == f"# {Study.model_fields[key].description}"
    assert lines[lines.index("[[optimizers]]") - 1] == f"# {Study.model_fields['optimizers'].description}"


def test_unknown_studies_are_refused_with_the_list(tmp_path: Path) -> None:
    known = ", ".join(STUDIES)
    with pytest.raises(UserError, match=rf"^'dmeo'.*\bdemo\b.*: {known}$"):
        load_study("dmeo")
    with pytest.raises(ValueError, match=rf"/missing.toml: .*: {known}$"):
        load_study(str(tmp_path / "missing.toml"))
    with pytest.raises(ValueError, match=rf"^{tmp_path}.*study\.toml"):
        load_study(str(tmp_path))
    (tmp_path / "image.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"/image.toml: .*\b0\b.*UTF-8"):
        load_study(str(tmp_path / "image.toml"))


def test_a_study_without_a_report_section_leads_with_the_loss() -> None:
    """Such as a study written by version 0.1."""
    before, section, after = study_text("demo").partition("[report]")
    assert section
    old = parse_study(before + after[after.index("[[optimizers]]") :], "old", Path())
    assert (old.report.lead, old.report.loss_note) == ("loss", None)
    assert [cell.config_hash for cell in cells_of(old)] == [cell.config_hash for cell in shipped("demo")]
    changed, left = with_settings(old, ["report.lead=embeddings", "report.loss_note=Too small."])
    assert (changed.report.lead, changed.report.loss_note, left) == ("embeddings", "Too small.", [])


def test_a_study_is_frozen() -> None:
    study: Study = load_study("demo")
    with pytest.raises(ValueError, match="frozen"):
        study.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("setting", ["seeds=[4]", "tokens=5k", "models=x", "optimizers=x"])
def test_an_axis_of_the_grid_is_restricted_with_only_and_not_with_set(setting: str) -> None:
    with pytest.raises(UserError, match=rf"^--set {re.escape(setting)}: .*--only"):
        with_settings(load_study("demo"), [setting])


def test_a_later_set_overrides_the_settings_of_the_first_run() -> None:
    study = with_override(*with_settings(load_study("demo"), ["log.every=3", "seed=1"]))
    again = with_override(*with_settings(study, ["log.every=5"]))
    assert again.override == {"log.every": 5, "seed": 1}
