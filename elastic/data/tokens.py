"""The dataset that most jobs use: each sample is ``seq_len`` + 1 consecutive tokens, and shares one token
with the next sample.

So every token but the first is predicted exactly once an epoch.  Tokens left over at the end, too few for a
sample, are not used.

Samples are packed: they begin and end anywhere in a document, and have no padding.  With ``documents`` a
batch also says to which document of its sample each token belongs, so that a model can keep them apart; first
tokens of documents are then not predicted.  A document ends with its end-of-document token, as with
``reset_attention_mask`` and ``eod_mask_loss`` of Megatron-LM.  If a sample cuts a document, the rest is a
document of the next sample.
"""

from __future__ import annotations

import numpy as np
import torch

from elastic.data.show import encoder_of, open_tokens
from elastic.data.tokenizer import Encoder
from elastic.errors import DataError
from storage.objects import ObjectStore


class TokenDataset:
    """Reads the samples of a prepared dataset.

    ``path`` is the folder or URL that ``elastic data prepare`` wrote.  With ``documents`` the tokens of a
    sample attend only to their own document, if model and loss know of documents, as ours do.  Raises
    :class:`DataError` if ``path`` holds no sample.
    """

    def __init__(self, path: str, seq_len: int, documents: bool = False) -> None:
        if seq_len < 1:
            raise DataError(f"data.args.seq_len = {seq_len} must be at least 1")
        if not isinstance(documents, bool):
            raise DataError(f"data.args.documents = {documents!r} must be true or false")
        self.path, self.seq_len, self.documents = path, seq_len, documents
        self._files = open_tokens(path)
        self.vocabulary = self._files.description.vocabulary
        """Size of the vocabulary: every token is smaller than this."""
        tokens = self._files.description.tokens
        self._samples = (tokens - 1) // seq_len
        if self._samples < 1:
            raise DataError(
                f"data.args.path = {path!r} has {tokens} tokens, too few for one sample of seq_len + 1 = "
                f"{seq_len + 1}; prepare more text, or lower data.args.seq_len"
            )

    def __len__(self) -> int:
        return self._samples

    def read(self, ids: tuple[int, ...]) -> dict[str, torch.Tensor]:
        """Returns ``{"tokens": int64 [samples, seq_len + 1]}``, and with ``documents`` also ``"documents"``,
        int32 of the same shape.

        Documents are counted from 0 in each sample.  Raises :class:`IndexError` if there is no such sample.
        """
        for sample in ids:
            if not 0 <= sample < self._samples:
                raise IndexError(f"there is no sample {sample} in a dataset of {self._samples} samples")
        rows = self._files.rows([sample * self.seq_len for sample in ids], self.seq_len + 1)
        batch = {"tokens": torch.from_numpy(rows.astype(np.int64))}
        if self.documents:
            ends = rows == self._files.description.end_of_document
            batch["documents"] = torch.from_numpy(ends.cumsum(axis=1, dtype=np.int32) - ends)
        return batch

    def encoder(self) -> Encoder:
        """Returns the encoder that turned the text into tokens."""
        return encoder_of(ObjectStore.open(self.path), self._files.description)

    def fingerprint(self) -> str:
        """Returns a digest of all tokens, the sample length, and whether documents are told.  It does not
        depend on where the data lies.
        """
        return f"{self._files.description.fingerprint}/{self.seq_len}{'/documents' if self.documents else ''}"
