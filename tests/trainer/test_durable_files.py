"""Which errors mean a full disk."""

import errno

import pytest

from ratoon.trainer.durable_files import is_disk_full


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (OSError(errno.EACCES, "denied, (os error 28)"), False),
        (Exception("No space left on device (os error 28)"), True),  # as tokenizers raises it
        (Exception("I/O error: Disk quota exceeded (os error 122)"), True),
        (Exception("Permission denied (os error 13)"), False),
        (KeyError("os error 28"), False),
        (UnspeakableError(), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_full_disks_are_told_from_other_errors(error: BaseException, is_full: bool):
    assert is_disk_full(error) == is_full
