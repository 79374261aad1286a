"""Models for lm-eval, which asks for the log-likelihoods of texts.

lm-eval's own rules (`TemplateLM`) turn texts into tokens, then one function answers all requests of a task: our model,
a file of scores, or a function that only records the requests. A Hugging Face folder uses lm-eval's own class.

The classes are defined inside functions, because lm-eval is imported there.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from coupled_adam.base.errors import UserError
from coupled_adam.base.text import counted
from coupled_adam.evaluation.downstream.requests_file import Score, ScoreFile, TokenRequest
from coupled_adam.tokenizer import Tokenizer

Answer = Callable[[list[TokenRequest]], Sequence[Score]]
OnRequests = Callable[[int, int], None]
"""Called with the number of requests done, and their total."""
# Largest logits of a batch: transformers returns them for all positions, and lm-eval makes a copy.
LOGIT_BYTES = {"cpu": 2**28, "cuda": 2**32}
# The choices of a question repeat the same context.
RECENT_TEXTS = 64


def answering_model(tokens: Tokenizer, answer: Answer) -> Any:
    """Make an lm-eval model whose requests are answered by a function.

    Args:
        tokens: the tokenizer.
        answer: maps requests to their scores, in order.
    """
    from lm_eval.api.model import TemplateLM

    encode = lru_cache(RECENT_TEXTS)(tokens.encode)
    end_of_text = tokens.separator_token

    class AnsweringModel(TemplateLM):  # type: ignore[misc, unused-ignore]
        @property
        def eot_token_id(self) -> int:
            if tokens.separator is None:
                raise UserError(
                    f"the tokenizer {tokens.name} has no end-of-text token, which lm-eval uses as the empty context; "
                    "pass a tokenizer with such a token"
                )
            return tokens.separator

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            if add_special_tokens is None:  # unless the text already starts with one
                add_special_tokens = end_of_text is None or not string.startswith(end_of_text)
            return encode(string, add_special_tokens)

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
            return super().loglikelihood(requests, disable_tqdm=True)  # type: ignore[no-any-return, unused-ignore]

        def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
            asked = [token_request(*request) for request in requests]
            return [(score.log_likelihood, score.is_greedy) for score in answer(asked)]

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            raise AssertionError("check_tasks refuses other output types")

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            raise AssertionError("check_tasks refuses other output types")

    return AnsweringModel()


def token_request(texts: tuple[str, str], context: list[int], continuation: list[int]) -> TokenRequest:
    """Convert an lm-eval request; raise if the task's document leaves nothing to score."""
    if not context or not continuation:
        raise UserError(
            f"a request of the task has an empty {'context' if not context else 'continuation'}: context "
            f"{texts[0][-60:]!r}, continuation {texts[1][:60]!r}; correct the document it comes from"
        )
    return TokenRequest(tuple(context), tuple(continuation))


def written_down(found: dict[TokenRequest, None]) -> Answer:
    """Record each distinct request in order, and answer with dummy scores."""

    def answer(requests: list[TokenRequest]) -> list[Score]:
        found.update(dict.fromkeys(requests))
        return [Score(0.0, False)] * len(requests)

    return answer


def looked_up(scores: ScoreFile, task: str) -> Answer:
    """Answer from a file of scores."""

    def answer(requests: list[TokenRequest]) -> list[Score]:
        found = [scores.find(task, request) for request in requests]
        known = [score for score in found if score is not None]
        if len(known) < len(found):
            raise UserError(
                f"the scores lack {len(found) - len(known)} of its {counted(len(found), 'request')}; they were written "
                "for other documents, or with another --limit, tokenizer or lm-eval. Write the requests again on this "
                "machine and score them again"
            )
        unasked = len(scores.scores[task]) - len(set(requests))
        if unasked:
            raise UserError(
                f"its documents here have {counted(unasked, 'request')} fewer than were scored; pass the documents "
                "that the requests were written from, or write the requests again"
            )
        return known

    return answer


def hugging_face_model(
    folder: Path, *, device: str, precision: Literal["float32", "bf16"], on_requests: OnRequests
) -> Any:
    """Make lm-eval's own model for a Hugging Face folder, with batches of bounded size.

    Args:
        folder: with the model and its tokenizer.
        device: "cpu" or "cuda".
        precision: of the weights and the computation.
        on_requests: called after each batch.
    """
    from lm_eval.models.huggingface import HFLM

    class FolderModel(HFLM):  # type: ignore[misc, unused-ignore]
        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
            return super().loglikelihood(requests, disable_tqdm=True)  # type: ignore[no-any-return, unused-ignore]

        def _loglikelihood_tokens(
            self, requests: list[Any], disable_tqdm: bool = True, override_bs: int | None = None
        ) -> list[tuple[float, bool]]:
            for request in requests:  # lm-eval would fail with an assertion
                token_request(*request).require_room(self.max_length)
            # Longest first, equal contexts next to each other, as in lm-eval, which computes those only once.
            order = sorted(range(len(requests)), key=lambda place: _length_and_tokens(requests[place]))
            answers: list[Any] = [None] * len(requests)
            positions = LOGIT_BYTES[device] // (4 * self.model.config.vocab_size)
            done = 0
            while done < len(order):
                _, context, continuation = requests[order[done]]
                length = min(len(context) + len(continuation), self.max_length)
                batch = order[done : done + max(1, positions // length)]
                scored = super()._loglikelihood_tokens(
                    [requests[place] for place in batch], disable_tqdm=True, override_bs=len(batch)
                )
                for place, score in zip(batch, scored, strict=True):
                    answers[place] = score
                done += len(batch)
                on_requests(done, len(order))
            return answers

    dtype = {"float32": "float32", "bf16": "bfloat16"}[precision]
    # "auto" allows a different size for each batch.
    return FolderModel(pretrained=str(folder), device=device, dtype=dtype, batch_size="auto")


def _length_and_tokens(request: Any) -> tuple[int, list[int]]:
    _, context, continuation = request
    return -(len(context) + len(continuation)), context + continuation
