"""Text becomes tokens and text again: nothing is lost, nothing depends on chance, and each document has one
end.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from actors.cli import main
from elastic.data import tokenizer as module
from elastic.data.prepare import prepare
from elastic.data.show import encoder_of, show
from elastic.data.text_sources import Document
from elastic.data.tokenizer import END, Bytes, Encoder, Trained, train_bpe
from elastic.errors import DataError
from storage.datasets import TOKENIZER, Coding, TokenFiles
from storage.objects import ObjectStore
from tests.data.texts import write_texts
from tests.support.patience import PATIENCE_S

TEXT = Path(__file__).read_text()
CORPUS = [Document(f"{n}", line.encode()) for n, line in enumerate(TEXT.splitlines(keepends=True))]
BPE = Trained(train_bpe(CORPUS, 400), "here")


def encoded(encoder: Encoder, *texts: bytes) -> list[list[int]]:
    return [
        tokens.tolist()
        for _, tokens in encoder.encode(Document(f"{n}", text) for n, text in enumerate(texts))
    ]


def words(*vocabulary: str, size: int = 0) -> Tokenizer:
    """Returns a tokenizer of whole words, filled up with unused words to ``size``."""
    known = [*vocabulary, *(f"w{n}" for n in range(len(vocabulary), size))]
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(known)}, unk_token=known[0]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def written(tokenizer: Tokenizer, path: Path) -> Path:
    path.write_text(tokenizer.to_str())
    return path


@given(st.lists(st.binary(max_size=60), max_size=5))
def test_any_bytes_are_themselves_again(texts: list[bytes]) -> None:
    rows = encoded(Bytes(), *texts)
    assert [Bytes().decode(np.array(row, np.uint16)) for row in rows] == texts
    assert all(row.count(256) == 1 and row[-1] == 256 for row in rows)


PIECES = st.characters(exclude_categories=["Cs"]) | st.sampled_from([END, " ", "\r\n", "de", "\x00"])


@given(st.lists(st.lists(PIECES).map("".join), max_size=5))
def test_any_text_is_itself_again_after_bpe(texts: list[str]) -> None:
    """A document may contain the text of the end-of-document mark; it stays plain text."""
    rows = encoded(BPE, *(text.encode() for text in texts))
    assert [BPE.decode(np.array(row, np.uint16)).decode() for row in rows] == texts
    end = BPE.coding.end_of_document
    assert all(row.count(end) == 1 and row[-1] == end and max(row) < BPE.coding.vocabulary for row in rows)


def test_bpe_is_worth_it() -> None:
    assert len(encoded(BPE, TEXT.encode())[0]) < 0.6 * len(TEXT.encode())


def test_batches_are_nobody_s_business(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [document.text for document in CORPUS]
    whole = encoded(BPE, *texts)
    monkeypatch.setattr(module, "BATCH_BYTES", 50)
    assert encoded(BPE, *texts) == whole


TRAIN = """
import hashlib, sys
from elastic.data.text_sources import documents, text_files
from elastic.data.tokenizer import train_bpe
print(hashlib.sha256(train_bpe(documents(text_files([sys.argv[1]])), 400)).hexdigest())
"""


def test_training_twice_gives_the_same_file(tmp_path: Path) -> None:
    """Training gives equal files twice in this process, and in two other processes, with one thread and with
    four.
    """
    write_texts(tmp_path, {"a.txt": TEXT, "b.txt": TEXT[:999]})
    digests = {
        subprocess.run(
            [sys.executable, "-c", TRAIN, str(tmp_path)],
            env={"RAYON_NUM_THREADS": threads, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_S,
        ).stdout
        for threads in ("1", "4")
    }
    assert len(digests) == 1
    assert train_bpe(CORPUS, 400) == train_bpe(CORPUS, 400)


# ---- into a dataset and out of it


def test_a_dataset_with_a_trained_bpe(store: ObjectStore, tmp_path: Path) -> None:
    source = write_texts(tmp_path / "text", {"a.txt": TEXT, "b.txt": f"Ä {END} 文"})
    summary = prepare(source, store.url, bpe=400)
    assert summary.made.vocabulary == 400 and summary == prepare(source, store.url, bpe=400)
    files = TokenFiles(store)
    about = files.description
    encoder = encoder_of(store, about)
    row = files.read(0, about.tokens)
    ends = np.flatnonzero(row == about.end_of_document) + 1
    assert [encoder.decode(part).decode() for part in np.split(row, ends)] == [TEXT, f"Ä {END} 文", ""]
    assert store.get(TOKENIZER) == encoder.coding.definition
    assert Tokenizer.from_buffer(store.get(TOKENIZER)).get_vocab_size() == 400
    with pytest.raises(DataError, match="already holds a dataset"):
        prepare(source, store.url, bpe=401)


def test_the_same_tokens_that_stand_for_something_else_are_another_dataset(tmp_path: Path) -> None:
    write_texts(tmp_path / "text", {"a.txt": "one two"})
    for name, vocabulary in (("1", ("</s>", "one", "two", "three")), ("2", ("</s>", "one", "two", "four"))):
        prepare(
            tmp_path / "text",
            str(tmp_path / name),
            tokenizer=written(words(*vocabulary), tmp_path / f"{name}.json"),
        )
    one, two = (TokenFiles(ObjectStore.open(str(tmp_path / name))) for name in "12")
    assert one.read(0, 3).tolist() == two.read(0, 3).tolist() == [1, 2, 0]
    assert one.description.fingerprint != two.description.fingerprint


@pytest.mark.parametrize(("size", "dtype"), [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_a_large_vocabulary_takes_wide_tokens(tmp_path: Path, size: int, dtype: str) -> None:
    tokenizer = written(words("<eos>", "a", size=size), tmp_path / "tokenizer.json")
    write_texts(tmp_path / "text", {"a.txt": f"a w{size - 1} a"})
    prepare(tmp_path / "text", str(tmp_path / "out"), tokenizer=tokenizer)
    files = TokenFiles(ObjectStore.open(str(tmp_path / "out")))
    assert (
        files.read(0, 4).tolist() == [1, size - 1, 1, 0]
        and files.dtype.name == dtype == files.description.dtype.name
    )
    assert files.description.files[0].size == 4 * np.dtype(dtype).itemsize


def test_what_a_tokenizer_does_for_inference_is_not_done(tmp_path: Path) -> None:
    """It may cut, pad, and add marks of its own; a dataset has only the text and one end for each document."""
    tokenizer = words("[UNK]", "<s>", "</s>", "a", "b")
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    assert encoded(Trained(tokenizer.to_str().encode(), "here"), b"a b a b a", b"b") == [
        [3, 4, 3, 4, 3, 2],
        [4, 2],
    ]
    assert encoded(Trained(tokenizer.to_str().encode(), "here", "<s>"), b"a") == [[3, 1]]


def test_numbers_may_have_gaps() -> None:
    tokenizer = Tokenizer(models.WordLevel({"</s>": 0, "a": 7}, unk_token="</s>"))
    assert Trained(tokenizer.to_str().encode(), "here").coding.vocabulary == 8


def test_show_and_prepare_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_texts(
        tmp_path / "text", {"a.txt": "Hello [red] world", "b.jsonl": json.dumps({"body": "and more"})}
    )
    out = str(tmp_path / "out")
    arguments = ["data", "prepare", str(tmp_path / "text" / "a.txt"), str(tmp_path / "text" / "b.jsonl"), out]
    assert main([*arguments, "--text-field", "body", "--train-bpe", "260"]) == 0
    assert "2 documents, " in capsys.readouterr().out
    assert main(["data", "show", out]) == 0
    shown = capsys.readouterr().out
    about = TokenFiles(ObjectStore.open(out)).description
    for part in (
        "tokenizer.json (blake3 ",
        "260 (uint16), 0 ends",
        f"{about.tokens}",
        about.fingerprint,
        "'Hello [red] worldand more'",
    ):
        assert part in shown
    assert main(["data", "show", str(tmp_path / "text")]) == 1
    assert "text' holds no dataset; `elastic data prepare` makes one" in capsys.readouterr().out
    assert main([*arguments, "--tokenizer", "x", "--train-bpe", "260"]) == 1
    assert "--tokenizer and --train-bpe both say what makes tokens of the text" in capsys.readouterr().out


def test_show_reads_back_bytes(tmp_path: Path) -> None:
    write_texts(tmp_path / "text", {"a.txt": "x" * 200})
    prepare(tmp_path / "text", str(tmp_path / "out"))
    shown = show(str(tmp_path / "out"))
    assert (shown["tokenizer"], shown["tokens"], shown["as text"]) == ("bytes", "201", repr("x" * 64))
    assert (
        Coding("bytes", 257, 256) == encoder_of(ObjectStore.open(str(tmp_path / "out")), Bytes.coding).coding
    )


# ---- a folder as the hub has it


@pytest.mark.parametrize("kept_in", ["tokenizer_config.json", "special_tokens_map.json", "added", "nowhere"])
def test_the_folder_of_a_published_tokenizer_says_how_documents_end(tmp_path: Path, kept_in: str) -> None:
    """The judge is transformers, which also writes the folder.  The control: the file alone takes the first
    name that it knows.
    """
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words("</s>", "stop", "a", "b"), eos_token="stop"
    )
    tokenizer.save_pretrained(tmp_path / "t")
    config = tmp_path / "t" / "tokenizer_config.json"
    told = json.loads(config.read_text())
    assert told["eos_token"] == "stop"
    if kept_in == "added":  # a form of older releases
        config.write_text(
            json.dumps(
                told
                | {"eos_token": {"content": "stop", "lstrip": False, "special": True, "__type": "AddedToken"}}
            )
        )
    elif kept_in != "tokenizer_config.json":
        config.write_text(json.dumps({name: value for name, value in told.items() if name != "eos_token"}))
    if kept_in == "special_tokens_map.json":
        (tmp_path / "t" / kept_in).write_text(json.dumps({"eos_token": "stop"}))
    (tmp_path / "a.txt").write_text("a b a")
    prepare(tmp_path / "a.txt", str(tmp_path / "out"), tokenizer=tmp_path / "t")
    files = TokenFiles(ObjectStore.open(str(tmp_path / "out")))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "t")
    end = 0 if kept_in == "nowhere" else theirs.eos_token_id
    assert files.read(0, files.description.tokens).tolist() == [
        *theirs("a b a", add_special_tokens=False)["input_ids"],
        end,
    ]
    assert files.description.end_of_document == end == (0 if kept_in == "nowhere" else 1)
    prepare(tmp_path / "a.txt", str(tmp_path / "alone"), tokenizer=tmp_path / "t" / "tokenizer.json")
    assert TokenFiles(ObjectStore.open(str(tmp_path / "alone"))).description.end_of_document == 0
    prepare(tmp_path / "a.txt", str(tmp_path / "named"), tokenizer=tmp_path / "t", end_of_document="b")
    assert TokenFiles(ObjectStore.open(str(tmp_path / "named"))).description.end_of_document == 3


# ---- refused


@pytest.mark.parametrize("how", ["bytes", "bpe", "tokenizer"])
def test_text_that_is_not_utf8_is_named_and_nothing_is_left(tmp_path: Path, how: str) -> None:
    write_texts(tmp_path / "text", {"a.txt": "good " * 99})
    (tmp_path / "text" / "b.txt").write_bytes(b"one\ntwo \xff")
    tokenizer = written(words("</s>"), tmp_path / "t.json")
    given: dict[str, object] = {"bytes": {}, "bpe": {"bpe": 300}, "tokenizer": {"tokenizer": tokenizer}}[how]  # type: ignore[assignment]
    with pytest.raises(
        DataError,
        match=(
            r"b\.txt, line 2: byte 0xff is not UTF-8; convert the file to "
            r"UTF-8, or leave it out"
        ),
    ):
        prepare(tmp_path / "text", str(tmp_path / "out"), **given)  # type: ignore[arg-type]
    assert ObjectStore.open(str(tmp_path / "out")).list() == []


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"bpe": 256},
            (
                r"^--train-bpe 256 is too small: 256 bytes and the end of a document already need 257 "
                r"tokens; give 257 or more$"
            ),
        ),
        (
            {"tokenizer": "absent.json"},
            (
                r"^--tokenizer 'absent\.json' cannot be read: No such file or "
                r"directory; give a tokenizer\.json"
            ),
        ),
        ({"tokenizer": "bad.json"}, r"^bad\.json is no tokenizer\.json: "),
        (
            {"tokenizer": "endless.json"},
            (
                r"^endless\.json has no token <\|endoftext\|> or .* to end documents with; name a "
                r"token with --end"
            ),
        ),
        (
            {"tokenizer": "slow"},
            (
                r"^--tokenizer 'slow' is a folder without tokenizer\.json \(vocab\.txt\); convert an "
                r"older tokenizer by Auto"
            ),
        ),
        (
            {"tokenizer": "broken"},
            (
                r"^broken/tokenizer_config\.json is no description of a tokenizer: .*; correct this "
                r"file, or give tokenizer\.json"
            ),
        ),
        (
            {"tokenizer": "other"},
            (
                r"^other/tokenizer\.json has no token stop to end documents with; name a token with "
                r"--end-of-document"
            ),
        ),
        (
            {"tokenizer": "endless.json", "end_of_document": "stop"},
            (
                r"^endless\.json has no token stop to "
                r"end documents with"
            ),
        ),
    ],
)
def test_what_cannot_work_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, object], sentence: str
) -> None:
    monkeypatch.chdir(
        write_texts(tmp_path, {"a.txt": "text", "bad.json": "{}", "endless.json": words("a").to_str()})
    )
    write_texts(
        tmp_path,
        {f"{name}/tokenizer.json": words("a").to_str() for name in ("broken", "other")}
        | {"slow/vocab.txt": "a"},
    )
    write_texts(
        tmp_path,
        {
            "broken/tokenizer_config.json": "{",
            "other/tokenizer_config.json": json.dumps({"eos_token": "stop"}),
        },
    )
    with pytest.raises(DataError, match=sentence):
        prepare("a.txt", "out", **given)  # type: ignore[arg-type]
    assert not Path("out").exists()


def test_a_file_in_utf16_is_named(tmp_path: Path) -> None:
    """Its bytes are valid UTF-8, with zeros between the letters, if it has no byte order mark."""
    (tmp_path / "a.txt").write_bytes("one\ntwo".encode("utf-16-le"))
    with pytest.raises(
        DataError,
        match=(
            r"a\.txt, line 1: many bytes are 0x00, as in UTF-16; convert the "
            r"file to UTF-8"
        ),
    ):
        prepare(tmp_path / "a.txt", str(tmp_path / "out"))
    assert ObjectStore.open(str(tmp_path / "out")).list() == []


WITHOUT = """
import sys
sys.modules["tokenizers"] = None
from elastic.data.prepare import prepare
from elastic.errors import DataError
print(prepare(sys.argv[1], sys.argv[1] + "-bytes").made.documents)
try:
    prepare(sys.argv[1], sys.argv[1] + "-bpe", bpe=300)
except DataError as error:
    print(error)
"""


def test_without_the_library_bytes_work_and_the_rest_says_what_to_install(tmp_path: Path) -> None:
    write_texts(tmp_path / "text", {"a.txt": "text"})
    command = [sys.executable, "-c", WITHOUT, str(tmp_path / "text")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=PATIENCE_S, cwd=Path(__file__).parents[2]
    )
    assert done.stdout == (
        "1\nthe library 'tokenizers' is not installed; run `pip install 'elastic-train[text]'`\n"
    )
