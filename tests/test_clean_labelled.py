"""Precision and recall on the labelled documents of the steps that change texts or compare documents.

Those of ``quality``, ``language`` and ``decontaminate`` are in the tests of these steps.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from clean_toys import drive
from cleaning_fixture import Labels, labelled, measured

from megatron_lite.clean.config import step_class
from megatron_lite.clean.step import Document
from megatron_lite.clean.steps.mask import Mask, MaskOptions
from megatron_lite.clean.steps.normalise import Normalise, NormaliseOptions, is_page


@pytest.fixture(scope="module")
def documents() -> list[Labels]:
    return labelled()


def test_pages_are_told_and_read(documents: list[Labels]) -> None:
    inside = {d["id"]: Document(d["text"]) for d in documents}
    Normalise(NormaliseOptions()).apply(list(inside.values()))
    pages = {d["id"] for d in documents if d["kind"] == "html"}
    precision, recall = measured("normalise, pages told", documents, pages, {d["id"] for d in documents if is_page(d["text"])})
    assert precision == 1.0 and recall == 1.0
    assert all(part in inside[d["id"]].text for d in documents for part in d["expect"])
    assert not any(part in inside[d["id"]].text for d in documents for part in d["unexpected"])
    for d in documents:
        if d["id"] not in pages:
            assert inside[d["id"]].text == d["text"].strip("\n").replace("\n\n\n", "\n\n"), "plain text is as it was"


def test_private_data_is_masked(documents: list[Labels]) -> None:
    inside = {d["id"]: Document(d["text"]) for d in documents}
    step = Mask(MaskOptions())
    step.apply(list(inside.values()))
    private = [(d["id"], text) for d in documents for _, text in d["private"]]
    gone = sum(text not in inside[name].text for name, text in private)
    precision, recall = gone / sum(step.counts.values()), gone / len(private)
    print(f"mask: {len(private)} to find: precision {precision:.3f}, recall {recall:.3f}")
    assert len(private) >= 16 and precision >= 0.95 and recall >= 0.95


@pytest.mark.parametrize("name", ["exact", "bloom", "minhash"])
def test_copies_are_dropped(name: str, documents: list[Labels], tmp_path: Path) -> None:
    kind = step_class(name)
    documents = [d for d in documents if d["quality"] == "keep"]  # the others are good texts with a fault each, like each other
    found = drive(partial(kind, kind.Options()), [d["text"] for d in documents], tmp_path)  # type: ignore[arg-type]
    labels = ["duplicate_of", "near_duplicate_of"] if name == "minhash" else ["duplicate_of"]
    wanted = {d["id"] for d in documents if any(d[label] for label in labels)}
    got = {d["id"] for d, document in zip(documents, found, strict=True) if document.dropped}
    precision, recall = measured(name, documents, wanted, got)
    assert precision >= 0.95 and recall >= (0.95 if name == "minhash" else 1.0), (got - wanted, wanted - got)
