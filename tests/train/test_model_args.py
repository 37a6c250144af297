"""What the user's model makes of its arguments: whatever it raises is a sentence that names setting, value and place."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn

from elastic.errors import CodeError, ModelError
from elastic.train.model import build_model
from storage.errors import Unavailable
from tests.support.toys import toy_job

pytestmark = pytest.mark.fast

LLAMA = "elastic.models.llama:build"
HERE = "tests.train.test_model_args"


def narrow(dim: int) -> nn.Module:
    if dim > 8:
        raise KeyError("too wide")
    return nn.Linear("8", dim)  # type: ignore[arg-type]


def from_bucket() -> nn.Module:
    raise Unavailable("s3://bucket/table", "it does not answer")


@pytest.mark.parametrize(
    ("model", "args", "said"),
    [
        (LLAMA, {"dims": 256}, r"got an unexpected keyword argument 'dims' \(in \S+llama.py, line \d+\)"),
        (LLAMA, {"dim": "32"}, r"TypeError: .*'str' and 'int' \(in \S+llama.py, line \d+\)"),
        (LLAMA, {"dim": 10, "heads": 3}, r"ValueError: dim = 10 must be a multiple of 2 × heads = 6: .*llama.py"),
        (LLAMA, {"dim": 9, "heads": 3}, r"dim = 9 must be a multiple of 2 × heads = 6"),
        (LLAMA, {"dim": 32, "heads": 4, "kv_heads": 3}, r"heads = 4 must be a multiple of kv_heads = 3"),
        ("json:dumps", {}, r"TypeError: dumps\(\) missing 1 required positional argument: 'obj'"),
        ("os:sep", {}, r"TypeError: 'str' object is not callable"),
        (f"{HERE}:narrow", {"dim": 9}, r"KeyError: 'too wide' \(in \S+test_model_args.py, line \d+\)"),
        (f"{HERE}:narrow", {"dim": 4}, r"TypeError: .* \(in \S+test_model_args.py, line \d+\)"),
    ],
)
def test_arguments_that_the_model_does_not_take(model: str, args: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as caught:
        build_model(toy_job("/bucket", model=model, model_args=args))
    text = str(caught.value)
    assert text.startswith(f"model_args = {args}: model = '{model}' failed with "), text
    assert re.search(said, text) and text.endswith("; correct the arguments, or the model") and "\n" not in text, text


def test_arguments_that_it_takes() -> None:
    """The control; and a bucket that does not answer is nobody's error."""
    build_model(toy_job("/bucket", model=LLAMA, model_args={"dim": 32, "heads": 4, "kv_heads": 2}))
    with pytest.raises(Unavailable):
        build_model(toy_job("/bucket", model=f"{HERE}:from_bucket", model_args={}))


def test_code_that_is_not_there_is_named_with_its_setting() -> None:
    with pytest.raises(CodeError, match=r"^model = 'elastic.models.llama:nothing': the module elastic.models.llama .* has no 'nothing'"):
        build_model(toy_job("/bucket", model="elastic.models.llama:nothing"))
