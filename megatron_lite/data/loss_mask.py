"""The second pair of files of a fine-tuning set: ``PREFIX_loss_mask``, one uint8 for each token of ``PREFIX``.

1 says that the token counts as a target, 0 that it does not (a user's words, a template's). The pair has the same
sequences and documents as the tokens, byte for byte in its lengths and borders, so every position that an order of
samples derives from the index of the tokens is right for the mask as well. A data set that has the pair is trained with it.
"""

from __future__ import annotations

import numpy as np

from megatron_lite.data.index_format import mask_prefix, pieces
from megatron_lite.data.indexed import IndexedDataset


def open_mask(dataset: IndexedDataset) -> IndexedDataset | None:
    """The mask beside ``dataset``, or None where there is none.

    Raises:
        FileNotFoundError: half of the pair is missing.
        ValueError: it is broken, holds anything but 0 and 1, or belongs to other tokens.
    """
    prefix = mask_prefix(dataset.prefix)
    if not dataset.access.exists(prefix):
        return None
    mask = IndexedDataset(prefix, dataset.access)
    if mask.dtype != np.uint8 or mask.largest_id() > 1:
        raise ValueError(f"{prefix}.bin is no loss mask: it must hold uint8 numbers, 0 or 1")
    same = len(mask) == len(dataset) and mask.num_documents == dataset.num_documents
    if not (same and _equal(mask.lengths, dataset.lengths) and _equal(mask.documents, dataset.documents)):
        raise ValueError(
            f"{prefix} is not the loss mask of {dataset.prefix}: it has {len(mask)} sequences and {mask.num_tokens} tokens, the "
            f"tokens {len(dataset)} and {dataset.num_tokens}, and all lengths must be equal. Make both anew, or remove the mask"
        )
    return mask


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays of one length are equal, without copies of them."""
    return all(np.array_equal(piece, b[start : start + len(piece)]) for start, piece in pieces(a))
