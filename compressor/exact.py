"""The model's own tokenizer as a counter: a local tokenizer.json through `tokenizers`."""

from collections.abc import Callable
from pathlib import Path


def load_counter(file: Path) -> Callable[[str], int]:
    """A counter for `exact_counter`; special tokens are the caller's `fixed_tokens`.

    Raises ImportError when the extra `exact` is not installed, ValueError when the file is
    no tokenizer. The counter cannot be pickled: load it in each worker.
    """
    # Imported here: an optional extra, and slow to import.
    from tokenizers import Tokenizer  # noqa: PLC0415

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file} is not a tokenizer.json: {error}") from error

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    return count
