"""The theory measured on real runs, compared with loops and with training's own optimizer, and after interruptions."""

import hashlib
import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from theory_models import V, milestone_run, small_model, windows

from coupled_adam.base.errors import UserError
from coupled_adam.data.batches import Batches
from coupled_adam.data.corpus import Corpus
from coupled_adam.evaluation.weights import load_run, load_weights
from coupled_adam.theory import fits, identity, token_statistics
from coupled_adam.theory.identity import identity_error
from coupled_adam.theory.measure import theory_of_run
from coupled_adam.theory.record import run_from_json
from coupled_adam.theory.theory_folder import TheoryFolder
from coupled_adam.theory.token_statistics import TokenStatistics
from coupled_adam.training.optimizers import build_optimizers
from coupled_adam.training.train_step import TrainStep

K = 3


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A run with Coupled Adam, whose second moment differs from the measured one."""
    return milestone_run(tmp_path_factory.mktemp("theory"), optimizer={"embeddings": "coupled", "max_grad_norm": 0.1})


@pytest.fixture(scope="module")
def measured(made):
    return theory_of_run(made, batches=K)


@pytest.fixture
def run(made, measured, tmp_path) -> Path:
    """A copy of the measured run that tests may change."""
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


def steps_measured(run, **options):
    """The steps of the checkpoints that a call measures, and its result."""
    seen: list[tuple[int, int, int]] = []
    theory = theory_of_run(run, batches=K, on_progress=lambda *values: seen.append(values), **options)
    return sorted({step for _, _, step in seen}), theory


def head_input(batch):
    model = small_model()
    return (
        model.hidden_states(batch[:, :-1]).detach().flatten(0, 1),
        model.lm_head.weight.detach(),
        batch[:, 1:].flatten(),
    )


def test_token_statistics_by_loops(monkeypatch):
    monkeypatch.setattr(token_statistics, "COORDINATES", 3)
    monkeypatch.setitem(token_statistics.CHUNK_BYTES, "cpu", 4 * V * 10)  # ten positions at once
    hidden, table, targets = head_input(windows(6))
    found = TokenStatistics(table)
    found.add(hidden[:40], targets[:40])
    found.add(hidden[40:], targets[40:])
    h, p = hidden.double(), torch.softmax(hidden.double() @ table.double().T, dim=1)
    N, coordinates = len(h), [0, 2, 5]
    S = [float((h[:, j] ** 2).mean()) for j in range(h.shape[1])]
    for i in range(V):
        true = [float((1 - p[n, i]) ** 2) for n in range(N) if targets[n] == i]
        false = [float(p[n, i] ** 2) for n in range(N) if targets[n] != i]
        g = torch.stack([-(float(targets[n] == i) - p[n, i]) * h[n] for n in range(N)])  # (N, H)
        x_true = sum(true) / len(true) if true else 0.0
        rhs = len(true) / N * x_true + len(false) / N * sum(false) / len(false)
        assert found.target_counts[i] == len(true)
        assert bool(torch.isnan(found.x_true[i])) == (not true)
        for value, expected in (
            (found.x_true[i].nan_to_num(0.0), x_true),
            (found.x_false[i], sum(false) / len(false)),
            (found.squared_gradient[i], (g**2).mean()),
            (found.squared_gradient_predicted[i], sum(S) / len(S) * rhs),
            *zip(found.element_squared_gradient[:, i], (g**2).mean(0)[coordinates], strict=True),
            *zip(found.element_squared_gradient_predicted[:, i], [S[j] * rhs for j in coordinates], strict=True),
        ):
            assert float(value) == pytest.approx(float(expected), rel=1e-4, abs=1e-30)


def test_x_false_of_a_token_that_is_always_certain_is_not_rounding():
    table = torch.tensor([[20.0], [-20.0], [0.0]])
    found = TokenStatistics(table)
    found.add(torch.ones(500, 1), torch.zeros(500, dtype=torch.int64))  # p_0 = 1 - 2e-9
    found.add(-torch.ones(1, 1), torch.ones(1, dtype=torch.int64))  # p_0 = 4e-18
    assert float(found.x_false[0]) == pytest.approx(0.0, abs=1e-30)


def test_theorem_is_exact_if_h_squared_is_constant_and_not_if_it_depends_on_the_target():
    generator = torch.Generator().manual_seed(0)
    signs = torch.randn(400, 4, generator=generator).sign()
    table, targets = torch.randn(V, 4, generator=generator), torch.randint(V, (400,), generator=generator)
    fitted = []
    for hidden in (signs, signs * (1 + targets[:, None] % 3)):
        statistics = TokenStatistics(table)
        statistics.add(hidden, targets)
        fitted.append(fits.theorem_fit(statistics.squared_gradient, statistics.squared_gradient_predicted))
    assert fitted[0].slope == pytest.approx(1, abs=1e-6)
    assert fitted[0].r2 == pytest.approx(1, abs=1e-9)
    assert fitted[1].r2 < 0.95


def test_gradient_identity_holds_and_a_wrong_formula_is_detected(monkeypatch):
    inputs = head_input(windows(6))
    assert identity_error(*inputs) < 1e-13
    right = identity.gradient_by_formula
    monkeypatch.setattr(
        identity, "gradient_by_formula", lambda h, E, t, b: right(h, E, t, b) + 1e-6 * F.one_hot(t[0], V).sum()
    )
    assert identity_error(*inputs) > 1e-8


def test_second_moment_equals_that_of_adamw_on_the_following_batches(made, measured):
    """Compared with training steps of AdamW at learning rate zero, from the checkpoint of a run with Coupled Adam."""
    model, config, corpus = load_run(made, checkpoint=6)
    section = config.optimizer.model_copy(update={"embeddings": "adamw"})
    optimizers = build_optimizers(model, section)
    step = TrainStep(model, optimizers, precision=nullcontext)
    order = Batches(corpus.tokens("train"), 16, 8, config.seed, "random")
    batches = [order.samples(n, 0, 8) for n in range(6, 6 + K)]
    seen = [step([(batch[:, :-1], batch[:, 1:])], 0.0) for batch in batches]
    v = optimizers.optimizers[0].state[model.get_parameter(model.output_table_name)]["exp_avg_sq"]
    expected = (v / (1 - section.beta2**K)).mean(1).numpy()
    np.testing.assert_allclose(TheoryFolder(made).read_arrays(6).second_moment, expected, rtol=1e-4)
    checkpoint = measured.checkpoints[0]
    assert checkpoint.loss == pytest.approx(np.mean([float(loss) for loss, _ in seen]), rel=1e-5)
    assert checkpoint.clip_factors == pytest.approx([0.1 / float(norm) for _, norm in seen], rel=1e-4)
    counts = np.bincount(np.concatenate([batch[:, 1:].flatten() for batch in batches]), minlength=64)
    assert np.array_equal(TheoryFolder(made).read_arrays(6).target_counts, counts)


def test_the_papers_statements_are_confirmed_at_every_checkpoint(measured):
    assert [(each.step, each.tokens_seen) for each in measured.checkpoints] == [(6, 6 * 128), (12, 12 * 128)]
    for each in measured.checkpoints:
        assert each.identity_error < 1e-12
        assert max(each.gradient_sums["output"]) < 1e-6
        assert min(each.gradient_sums["input"]) > 1e-3
        assert each.update("sgd").output < 1e-6
        assert each.update("coupled").output < 1e-6
        assert each.update("adam").output > 1e-2
        assert each.theorem.slope == pytest.approx(1, abs=0.05)
        assert {name: series["total"][-1] for name, series in each.update_series.items()} == {
            each.optimizer: each.total for each in each.updates
        }
        assert [len(values) for values in each.gradient_sums.values()] == [K] * 6
    assert measured.summary["second_moment_r2"].std is not None
    assert measured.notes == []


def test_fits_use_the_tokens_of_the_corpus_and_its_counts(made, measured):
    counts = np.load(made.parent / "corpus" / "unigram.npy")  # 61, of 64 rows
    arrays = TheoryFolder(made).read_arrays(12)
    fit = measured.checkpoints[1].fits["second_moment"]
    assert fit == fits.fit_through_origin(arrays.second_moment[:61], counts / counts.sum())
    assert (fit.count, measured.vocabulary_size, measured.rows) == (61, 61, 64)


def test_mean_embedding_is_without_padding(made, measured):
    model, _, _ = load_run(made, checkpoint=12)
    mu = model.lm_head.weight.detach().double()[:61].mean(0)
    assert measured.checkpoints[1].mu_norm == pytest.approx(float(mu.norm()), rel=1e-9)


def test_theory_json_contains_the_returned_numbers(made, measured):
    assert TheoryFolder(made).read_run() == measured
    text = measured.to_json()
    assert run_from_json(text, "theory.json") == measured
    with pytest.raises(UserError, match=r"theory.json: checkpoints.0.loss: .* --fresh"):
        run_from_json(text.replace('"loss"', '"lost"', 1), "theory.json")


def test_nothing_is_measured_twice_even_without_weights_and_tokens(run, measured):
    shutil.rmtree(run / "checkpoints")
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("corpus", "gone"))
    steps, theory = steps_measured(run)
    assert steps == []
    assert theory.checkpoints == measured.checkpoints


def test_a_stopped_measurement_resumes(run, measured):
    (run / "theory" / "step-000000012.json").unlink()
    assert steps_measured(run) == ([12], measured)
    (run / "theory" / "step-000000006.json").write_text('{"of": ')
    assert steps_measured(run) == ([6], measured)
    assert steps_measured(run, fresh=True) == ([6, 12], measured)


def test_other_weights_batches_or_precision_are_measured_again(run):
    record = run / "theory" / "step-000000006.json"
    content = json.loads(record.read_text())
    record.write_text(json.dumps(content | {"of": content["of"] | {"weights": "of another run"}}))
    assert steps_measured(run)[0] == [6]
    steps, theory = steps_measured(run, precision="bf16", checkpoints=[12])
    assert steps == [12]
    assert "bf16" in theory.notes[0]
    assert [each.step for each in theory.checkpoints] == [12]
    # In bf16 a vanishing sum has a larger rounding error than in float32, but still a small one.
    assert 1e-6 < max(theory.checkpoints[0].gradient_sums["output"]) < 0.05


def test_measurements_of_version_0_1_0_are_kept(run, measured):
    """It stored twelve digits of another hash of the checkpoint's files."""
    for step in (6, 12):
        state = json.loads((run / "checkpoints" / f"step-{step:09d}" / "state.json").read_text())
        files = {name: file["sha256"] for name, file in state["files"].items()}
        old = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:12]
        record = run / "theory" / f"step-{step:09d}.json"
        content = json.loads(record.read_text())
        assert content["of"]["weights"] != old
        record.write_text(json.dumps(content | {"of": content["of"] | {"weights": old}}))
    assert steps_measured(run) == ([], measured)


def test_progress_counts_all_batches(run):
    seen = []
    theory_of_run(run, batches=2, on_progress=lambda *values: seen.append(values))
    assert seen == [(0, 4, 6), (1, 4, 6), (2, 4, 6), (2, 4, 12), (3, 4, 12), (4, 4, 12)]


def test_the_corpus_is_counted_once_for_all_checkpoints(tmp_path, monkeypatch):
    run = milestone_run(tmp_path)  # of a corpus without earlier measurements
    counted = []
    count = Corpus.unigram
    monkeypatch.setattr(Corpus, "unigram", lambda corpus: counted.append(corpus.folder) or count(corpus))
    steps, _ = steps_measured(run, fresh=True)
    assert (len(steps), len(counted)) == (2, 1)


def test_mutual_information_is_added_when_scikit_learn_is_installed_later(run, measured, monkeypatch):
    pytest.importorskip("sklearn")
    with monkeypatch.context() as without:
        for place in ("coupled_adam.theory.fits", "coupled_adam.theory.measure"):
            without.setattr(f"{place}.has_scikit_learn", lambda: False)
        theory = theory_of_run(run, batches=K, fresh=True)
        assert all(fit.mutual_information is None for each in theory.checkpoints for fit in each.fits.values())
        assert "scikit-learn" in theory.notes[0]
    shutil.rmtree(run / "checkpoints")
    steps, theory = steps_measured(run)
    assert steps == []
    for name, fit in theory.checkpoints[1].fits.items():
        assert fit.mutual_information == pytest.approx(measured.checkpoints[1].fits[name].mutual_information, abs=1e-6)
    stored = json.loads((run / "theory" / "step-000000006.json").read_text())
    assert stored["numbers"]["fits"]["x_false"]["mutual_information"] is not None
    assert stored["of"]["milestone"]


def test_an_untied_model_has_updates_of_both_tables(tmp_path):
    run = milestone_run(tmp_path, model={"tied": False}, optimizer={"embeddings": "sgd", "sgd_factor": 10.0})
    checkpoint = theory_of_run(run, batches=2).checkpoints[-1]
    for each in checkpoint.updates:
        assert each.input == 0
        assert each.total == each.output
    for each in checkpoint.input_updates:
        assert each.output == 0
        assert each.total == each.input > 1e-3
    assert checkpoint.update("coupled").total < 1e-6
    assert checkpoint.gradient_sums["total"] == checkpoint.gradient_sums["output"]


def test_refusals_name_the_problem_and_the_remedy(run, tmp_path):
    plain = milestone_run(tmp_path / "plain", checkpoints={"every": 4, "keep": 2})
    assert [each.step for each in theory_of_run(plain, batches=1).checkpoints] == [12]  # the newest
    assert [each.step for each in theory_of_run(plain, checkpoints=[8], batches=1).checkpoints] == [8]
    with pytest.raises(UserError, match=r"step 7\b.* 8, 12$"):
        theory_of_run(plain, checkpoints=[7])
    shutil.rmtree(plain / "checkpoints")
    with pytest.raises(UserError, match=r"plain/run: (?!.*--checkpoint).*milestones=10 --out FOLDER$"):
        theory_of_run(plain)
    with pytest.raises(UserError, match=str(tmp_path)):
        theory_of_run(tmp_path)
    with pytest.raises(UserError, match=r"precision\b.*'fp8'.*float32, bf16"):
        theory_of_run(run, precision="fp8")
    with pytest.raises(UserError, match=r"batches\b.* 0\b"):
        theory_of_run(run, batches=0)
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("corpus", "gone"))
    with pytest.raises(UserError, match=r"/gone: .*'small'.*`coupled-adam data prepare`"):
        theory_of_run(run, fresh=True)


def test_a_diverged_checkpoint_is_refused(made, monkeypatch):
    def spoilt(*arguments):
        weights = load_weights(*arguments)
        weights["ln_f.weight"].data.fill_(torch.nan)
        return weights

    monkeypatch.setattr("coupled_adam.theory.measure.load_weights", spoilt)
    with pytest.raises(UserError, match=r"step 12\b.*\bnan\b.*--checkpoint"):
        theory_of_run(made, checkpoints=[12], batches=1)


@pytest.mark.parametrize("seed", range(30))
def test_damaged_arrays_are_named_whatever_the_damage(measured, made, tmp_path, seed):
    """Wrong bytes anywhere: the checks of the archive, zlib and numpy fail in different ways."""
    random, folder = np.random.default_rng(seed), TheoryFolder(tmp_path)
    folder.path.mkdir()
    damaged = bytearray((made / "theory" / "step-000000006.npz").read_bytes())
    for place in random.integers(len(damaged), size=20):
        damaged[place] = random.integers(256)
    (folder.path / "step-000000006.npz").write_bytes(damaged)
    with pytest.raises(UserError, match=r"/step-000000006\.npz: .* --fresh"):
        folder.read_arrays(6)


def test_files_that_are_not_arrays_are_named(run, made):
    path = run / "theory" / "step-000000006.npz"
    for content in (b"", b"junk", (made.parent / "corpus" / "unigram.npy").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"/step-000000006\.npz: .* --fresh"):
            TheoryFolder(run).read_arrays(6)
    path.unlink()
    with pytest.raises(UserError, match=r"/step-000000006\.npz: .*No such file or directory.* --fresh"):
        TheoryFolder(run).read_arrays(6)


@pytest.mark.parametrize("content", ["[]", '{"of": null, "numbers": {}}', '{"of": [], "numbers": {}}', '{"of": {"st'])
def test_damaged_numbers_count_as_not_measured(run, content):
    (run / "theory" / "step-000000006.json").write_text(content)
    assert steps_measured(run)[0] == [6]


def test_z_loss_is_noted_because_sums_do_not_vanish_with_it(tmp_path):
    theory = theory_of_run(milestone_run(tmp_path, optimizer={"z_loss": 0.01}), batches=1, checkpoints=[12])
    assert "z_loss = 0.01" in theory.notes[0]
    assert min(theory.checkpoints[0].gradient_sums["output"]) > 1e-3
