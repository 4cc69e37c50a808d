"""Snippets of text to be told apart by the package that they are from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from twobw.training.data import DataError, EpochOrder, TextData


class PackageSnippets:
    """Snippets of ``sequence_length`` bytes and the package that each is from: the first folder on
    the way to its file from the one that was searched, as ``asyncio`` in the standard library.

    A snippet is of one file, and the files whose end is trained on are not those validated on: the
    split is that of the text, so that what was pre-trained on the same text with the same split has
    not seen the validation files either. There are as many snippets of each class, in training and
    in validation.

    Attributes:
        packages: names of the classes: the packages with the most files (on the side, training or
            validation, on which they have fewer), since a class seen in few files is hard to tell.
        num_labelled: snippets to train on.
        num_validation_windows: snippets to validate on.

    Args:
        text: what they are cut from.
        num_classes: packages to be told apart.
        samples_per_class: snippets of each class to train on, drawn from the seed; 0: as many as
            the class with the fewest has.
        seed: of the draw and of the order.

    Raises:
        DataError: too few packages, or too few snippets of one.
    """

    def __init__(
        self, text: TextData, *, num_classes: int, samples_per_class: int = 0, seed: int = 0
    ) -> None:
        self._text = text
        train, validation = _snippets_by_file(text)
        num_files = {name: min(len(train[name]), len(validation[name])) for name in train}
        ranked = sorted((n for n in num_files if num_files[n]), key=lambda n: (-num_files[n], n))
        if len(ranked) < num_classes:
            raise DataError(
                f"model.num_classes is {num_classes}, but only {len(ranked)} packages have files "
                "to train on and files to validate on; set fewer, give more text or another "
                "data.validation_fraction"
            )
        self.packages = tuple(ranked[:num_classes])
        labelled = [list(chain(*train[name])) for name in self.packages]
        fewest = min(map(len, labelled))
        count = samples_per_class or fewest
        if count > fewest:
            raise DataError(
                f"data.samples_per_class is {count}, but of one of the classes "
                f"({', '.join(self.packages)}) there are only {fewest}; set at most that"
            )
        draw = random.Random(f"{seed}/labelled")
        drawn = [draw.sample(starts, count) for starts in labelled]
        self._starts, self._labels = _interleave(drawn)
        self.num_labelled = len(self._starts)
        self._order = EpochOrder(self.num_labelled, seed)
        self._validation = [list(chain(*validation[name])) for name in self.packages]
        self.num_validation_windows = num_classes * min(map(len, self._validation))

    @property
    def description(self) -> str:
        """The text, the classes, and how many snippets there are."""
        return (
            f"{self._text.description}\nclasses: {', '.join(self.packages)}; "
            f"{self.num_labelled:,} labelled snippets to train on, "
            f"{self.num_validation_windows:,} to validate"
        )

    def batch(self, first_sample: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """Samples ``first_sample ...`` of the run: inputs ``(b, t)`` and classes ``(b,)``, int64.

        An epoch takes each labelled snippet once.
        """
        chosen = self._order.take(first_sample, batch_size)
        return self._cut(self._text.train, self._starts[chosen]), self._labels[chosen]

    def validation_batches(
        self, num_batches: int, batch_size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """At most ``num_batches`` batches of equal size, the classes in turn, the snippets of each
        spread evenly over what there is: the same in every run.

        They hold ``batch_size`` samples, or all there are if those are fewer.
        """
        size = min(batch_size, self.num_validation_windows)
        num_batches = min(num_batches, self.num_validation_windows // size)
        each = -(-num_batches * size // len(self.packages))
        spread = [
            [starts[index * len(starts) // each] for index in range(each)]
            for starts in self._validation
        ]
        starts, labels = _interleave(spread)
        for first in range(0, num_batches * size, size):
            part = slice(first, first + size)
            yield self._cut(self._text.validation, starts[part]), labels[part]

    def _cut(self, text: Tensor, starts: Tensor) -> Tensor:
        return text[starts[:, None] + torch.arange(self._text.sequence_length)].long()


def _snippets_by_file(
    text: TextData,
) -> tuple[dict[str, list[range]], dict[str, list[range]]]:
    """Where snippets start in the training and in the validation bytes, by package and file; of
    the file that the split cuts in two only those to train on, of files too short for one none."""
    length, num_train = text.sequence_length, len(text.train)
    train: dict[str, list[range]] = {}
    validation: dict[str, list[range]] = {}
    for extent in text.extents:
        if not extent.package:
            continue
        of_train = train.setdefault(extent.package, [])
        of_validation = validation.setdefault(extent.package, [])
        start, end = extent.start, extent.end
        if start < num_train:
            starts, ours = range(start, min(end, num_train) - length + 1, length), of_train
        else:
            start, end, ours = start - num_train, end - num_train, of_validation
            starts = range(start, end - length + 1, length)
        if starts:
            ours.append(starts)
    return train, validation


def _interleave(by_class: list[list[int]]) -> tuple[Tensor, Tensor]:
    """The numbers of all classes in turn, and the class of each; int64."""
    table = torch.tensor(by_class)
    labels = torch.arange(len(by_class)).repeat(table.shape[1])
    return table.T.flatten(), labels
