"""Models of transformers train as the library's own: it is the judge of initialisation, logits, loss and
gradients.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic.code.imports import code_digest, load
from elastic.engine.cuts import Cuts, cuts_of
from elastic.engine.kernels import apply_kernels
from elastic.engine.loss import next_token
from elastic.engine.recomputation import apply_recompute
from elastic.engine.recomputed_groups import apply_groups
from elastic.errors import CodeError
from elastic.kernels.attention import Kernel
from elastic.models.spec import ShardingTable
from elastic.plan.layout import Layout
from elastic.train.checks.preflight import preflight
from tests.engine.test_paged import paged, same
from tests.support.initialised import plain
from tests.support.patience import PATIENCE_S
from tests.support.ranks import Ranks
from tests.support.segments import train
from tests.support.toys import toy_job

transformers = pytest.importorskip("transformers", reason="the judge of these tests is not installed")
transformers_lm = pytest.importorskip("elastic.models.transformers_lm")
causal = pytest.importorskip("elastic.models.causal")

SMALL = {"vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GATED = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 16}
WINDOW = {**GATED, "sliding_window": 5}
BOTH = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
GRANITE = {
    **SMALL,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "logits_scaling": 4.0,
    "attention_multiplier": 0.3,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
CONFIGS: dict[str, tuple[dict[str, Any], int, bool]] = {
    "llama": (GATED, 2, True),
    "qwen3": ({**GATED, "tie_word_embeddings": True}, 2, True),
    "gpt2": (SMALL, 2, True),
    "gpt_neox": ({**SMALL, "intermediate_size": 48}, 2, True),
    "opt": ({**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 64}, 2, True),
    "phi": ({**SMALL, "intermediate_size": 48}, 2, False),
    "mistral": (WINDOW, 0, True),
    "gemma3_text": (BOTH, 1, True),
    "gemma2": (BOTH, 0, False),
    "granite": (GRANITE, 2, False),
    "bloom": (SMALL, 0, True),
    "gpt_oss": ({**BOTH, **EXPERTS}, 0, True),
    "mixtral": ({**GATED, **EXPERTS}, 2, True),
}
"""Models with the number of layers that attend by our function, and whether ours may compute the loss.

Phi's head has a bias, Mistral has windows, Gemma 3 both kinds of layers, Gemma 2 soft caps, Granite scaled
logits, BLOOM biases of positions, GPT-OSS sinks.
"""


def built(kind: str, **more: Any) -> nn.Module:
    """Returns our model as a member has it: built on the meta device, with memory of its own, and the values
    of the library's model.
    """
    config = {"model_type": kind, **CONFIGS[kind][0], **more}
    with torch.device("meta"):
        model = transformers_lm.build(config)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    model.init_weights()
    return model


def theirs_of(kind: str, **more: Any) -> nn.Module:
    """Returns the library's model, with other random weights."""
    config = transformers_lm.config_of({"model_type": kind, **CONFIGS[kind][0], **more}, None)
    made: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert made.config._attn_implementation in ("sdpa", "eager"), "the library's own attention"  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return made


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(0, 61, (2, 25), generator=torch.Generator().manual_seed(1))
    tokens[1, 20:] = -1
    return {"tokens": tokens}


def loss_and_gradients(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss, _ = next_token(model, batch())
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The masks with which our attention was called."""
    found: list[Any] = []
    real = transformers_lm.causal_attention
    monkeypatch.setattr(
        transformers_lm, "causal_attention", lambda *args: (found.append(args[3]), real(*args))[1]
    )
    return found


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_loss_and_gradients_are_the_librarys(kind: str, calls: list[Any]) -> None:
    """They are compared in float64, but for experts, whose kernel has none.  Our functions run just where
    that is right.
    """
    _, attends, fuses = CONFIGS[kind]
    ours, theirs = built(kind), theirs_of(kind)
    assert dict(ours.named_buffers()).keys() == dict(theirs.named_buffers()).keys()
    assert all(torch.equal(buffer, theirs.get_buffer(name)) for name, buffer in ours.named_buffers())
    ours.load_state_dict(theirs.state_dict())
    if "num_local_experts" not in CONFIGS[kind][0]:
        ours, theirs = ours.double(), theirs.double()
    tokens = batch()["tokens"].clamp_min(0)
    calls.clear()  # those on the meta device
    found, expected = ours(tokens), theirs(tokens).logits
    torch.testing.assert_close(found, expected)
    assert len(calls) == attends and hasattr(ours, "fuses_loss") == fuses
    if fuses:
        ours.fuses_loss = True  # type: ignore[assignment]
    loss, gradients = loss_and_gradients(ours)
    own = theirs(batch()["tokens"][:, :-1].clamp_min(0)).logits
    wanted = F.cross_entropy(
        own.flatten(0, 1), batch()["tokens"][:, 1:].flatten(), ignore_index=-1, reduction="sum"
    )
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach().to(loss.dtype), rtol=1e-5, atol=1e-5)
    for name, parameter in theirs.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-4)


def test_where_ours_is_wrong_it_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: a window that is ignored gives other logits, and a fused loss where logits are
    scaled gives another loss.
    """
    theirs, tokens = theirs_of("mistral"), batch()["tokens"].clamp_min(0)
    ours = built("mistral")
    ours.load_state_dict(theirs.state_dict())
    monkeypatch.setattr(transformers_lm, "sdpa_mask", lambda **facts: None)
    assert not torch.allclose(ours(tokens), theirs(tokens).logits, rtol=1e-3, atol=1e-3)
    scaled = built("granite")
    plain, _ = next_token(scaled, batch())
    scaled.lm_head.__class__ = transformers_lm.FusedHead
    scaled.fuses_loss = True  # type: ignore[assignment]
    fused, _ = next_token(scaled, batch())
    assert not torch.allclose(fused, plain, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("kind", "flexed"), [("llama", 2), ("gemma3_text", 1), ("mistral", 0)])
def test_flex_attention_gives_the_librarys_logits(kind: str, flexed: int, calls: list[Any]) -> None:
    """The control: dropout, of which FlexAttention knows nothing, takes torch's kernel."""
    ours, theirs, tokens = built(kind, attention_dropout=0.5), theirs_of(kind), batch()["tokens"].clamp_min(0)
    ours.load_state_dict(theirs.state_dict())
    calls.clear()
    ours.attends = Kernel.FLEX  # type: ignore[assignment]
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(tokens), theirs(tokens).logits)
        assert sum(mask is not None for mask in calls) == flexed
        calls.clear()
        ours.train()(tokens)
    assert all(mask is None for mask in calls)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "gpt2", "phi", "mixtral"])
def test_the_initialisation_is_the_librarys_page_by_page(kind: str) -> None:
    """It is the same for buffers that are not saved, such as rotary frequencies.  The control: a seed off by
    one.
    """
    config = {"model_type": kind, **CONFIGS[kind][0]}
    found, passes, _ = paged(lambda: transformers_lm.build(config), 7, 0)
    torch.manual_seed(7)
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers_lm.config_of(config, None), dtype=torch.float32
    )
    wanted = {name: tensor.detach() for name, tensor in (*theirs.named_parameters(), *theirs.named_buffers())}
    assert same(found, wanted) and passes == 1
    assert same(found, plain(lambda: transformers_lm.build(config), 7)) and not same(
        found, plain(lambda: transformers_lm.build(config), 8)
    )


@pytest.mark.fast
def test_blocks_are_the_decoder_layers() -> None:
    with torch.device("meta"):
        found = {
            kind: transformers_lm.build({"model_type": kind, **CONFIGS[kind][0]}).sharding()
            for kind in ("qwen3", "gpt2")
        }
    assert found["qwen3"].blocks == ("model.layers.0", "model.layers.1")
    assert found["gpt2"] == ShardingTable(("transformer.h.0", "transformer.h.1")), (
        "the library has no plan of it"
    )


def cuts(kind: str, **more: Any) -> dict[str, Cuts]:
    """Returns the cuts of the second block, by the end of the name, and of what is outside of blocks."""
    with torch.device("meta"):
        model = transformers_lm.build({"model_type": kind, **CONFIGS[kind][0], **more})
    found = cuts_of(model)
    return {name.rpartition(".1.")[2]: each for name, each in found.items() if ".layers.0." not in name}


@pytest.mark.fast
def test_a_table_follows_the_librarys_plans() -> None:
    """Two query heads of 16 share a key; GPT-NeoX has query, key and value of a head side by side."""
    outside = {
        "model.embed_tokens.weight": Cuts((0, 1), (0, 2)),
        "model.norm.weight": Cuts((), (1, 2)),
        "lm_head.weight": Cuts((0, 1), (1, 2)),
    }
    attention = {"q_proj": (0, 32), "k_proj": (0, 16), "v_proj": (0, 16), "o_proj": (1, 32)}
    layers = {"gate_proj": (0, 1), "up_proj": (0, 1), "down_proj": (1, 1)}
    norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
    block = {f"self_attn.{name}.weight": Cuts(split, (1, 2)) for name, split in attention.items()}
    block |= dict.fromkeys(norms, Cuts((), (1, 2)))
    dense = {f"mlp.{name}.weight": Cuts(split, (1, 2)) for name, split in layers.items()}
    assert cuts("llama") == {**outside, **block, **dense}
    qk_norms = dict.fromkeys(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), Cuts((), (1, 2)))
    tied = {**outside, "model.embed_tokens.weight": Cuts((0, 1), ())}
    del tied["lm_head.weight"]
    assert cuts("qwen3") == {**tied, **block, **dense, **qk_norms}
    experts = ("mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    assert cuts("mixtral") == {**outside, **block, **dict.fromkeys(experts, Cuts((), (1, 2)))}
    neox = cuts("gpt_neox")
    assert neox["attention.query_key_value.bias"] == Cuts((0, 48), (1, 2))
    assert neox["attention.dense.weight"] == Cuts((1, 16), (1, 2))


@pytest.mark.fast
def test_where_a_plan_is_not_known_nothing_is_cut() -> None:
    """GPT-2 has no plan, that of GPT-OSS has no layers, and an adapter is no plain layer."""
    assert set(cuts("gpt2").values()) == {Cuts()}
    assert not any(cut.split for cut in cuts("gpt_oss").values())
    with torch.device("meta"):
        model = transformers_lm.build({"model_type": "llama", **CONFIGS["llama"][0]})
        model.model.layers[0].self_attn.q_proj = nn.Sequential(model.model.layers[0].self_attn.q_proj)
    assert not any(cut.split for cut in cuts_of(model).values())
    assert cuts_of(model)["model.norm.weight"] == Cuts((), (1, 2)), "stages are whole blocks"


@pytest.mark.fast
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_table_fits_every_model(kind: str) -> None:
    table = transformers_lm.build({"model_type": kind, **CONFIGS[kind][0]}).sharding()
    assert len(table.blocks) == 2 and cuts(kind)
    assert all("norm" in name for name in table.sequence) and bool(table.sequence) is bool(table.column)
    assert bool(table.experts) is (kind == "mixtral")


# torch's own, while it compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kind", ["qwen3", pytest.param("gemma3_text", marks=pytest.mark.full), "gpt2"])
def test_blocks_recompute_and_compile_as_a_whole(kind: str) -> None:
    """Each is one graph; the loss and the gradients stay."""
    wanted = loss_and_gradients(built(kind))
    for policy in ("block", "sqrt", "attention", "selective"):
        model = built(kind)
        apply_recompute(model, model.sharding(), policy)  # type: ignore[operator]
        if policy == "sqrt":
            apply_groups(model, model.sharding())  # type: ignore[operator]
        assert all(
            torch.equal(a, b)
            for a, b in zip(loss_and_gradients(model)[1].values(), wanted[1].values(), strict=True)
        )
    model, graphs = built(kind), 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    for block in model.sharding().blocks:  # type: ignore[operator]
        model.get_submodule(block).compile(fullgraph=True, backend=backend)
    torch.testing.assert_close(loss_and_gradients(model), wanted)
    assert graphs


@pytest.mark.fast
def test_dropout_is_off_unless_it_is_configured(tmp_path: Path) -> None:
    def rates(*args: Any, **more: Any) -> set[float]:
        with torch.device("meta"):
            model = transformers_lm.build(*args, **more)
        return {module.p for module in model.modules() if isinstance(module, nn.Dropout)}

    small = {"model_type": "gpt2", **SMALL}
    assert rates(small) == {0.0} and rates({**small, "resid_pdrop": 0.2}) == {0.0, 0.2}
    transformers.GPT2Config(n_embd=64, n_head=4, n_layer=2, attn_pdrop=0.3).save_pretrained(tmp_path)
    assert rates(path=str(tmp_path)) == {0.1, 0.3}, "those of the file"
    assert rates({"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}, str(tmp_path)) == {0.0}


@pytest.mark.fast
def test_a_file_gives_the_config_and_arguments_replace_its_values(tmp_path: Path) -> None:
    transformers.Qwen3Config(**GATED, rope_theta=5e5, dtype="bfloat16").save_pretrained(tmp_path)
    config = transformers_lm.config_of({"num_attention_heads": 8}, str(tmp_path))
    assert (config.model_type, config.num_attention_heads, config.vocab_size) == ("qwen3", 8, 61)
    assert config.rope_parameters["rope_theta"] == 5e5
    with pytest.raises(ValueError, match="the config of 'qwen3' has no 'rope_theta'"):
        transformers_lm.config_of({"rope_theta": 1e6}, str(tmp_path))
    with torch.device("meta"):
        model = transformers_lm.build(path=str(tmp_path))
    assert model.vocab == 61 and {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.fast
@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {**SMALL},
            (
                r"model_type = None is no causal language model of transformers; name another "
                r"model_type, such as 'qwen3'"
            ),
        ),
        (
            {**SMALL, "model_type": "qwen33"},
            r"model_type = 'qwen33' is no .*; name another model_type, such as 'qwen3'",
        ),
        (
            {"model_type": "qwen3", "hiden_size": 8},
            (
                r"the config of 'qwen3' has no 'hiden_size'; did you "
                r"mean 'hidden_size'\?"
            ),
        ),
        (
            {"model_type": "mixtral", **GATED, "output_router_logits": True},
            (r"output_router_logits = true asks for .*; set output_router_logits to false"),
        ),
    ],
)
def test_a_config_that_cannot_be_right_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        transformers_lm.build(config)


TINY: dict[str, dict[str, Any]] = {
    "rembert": {
        **SMALL,
        "input_embedding_size": 16,
        "output_embedding_size": 16,
        "intermediate_size": 48,
        "pad_token_id": 0,
        "eos_token_id": 2,
    },
    "xlm": {"vocab_size": 61, "emb_dim": 32, "n_layers": 2, "n_heads": 4},
    "xlnet": {"vocab_size": 61, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
    "big_bird": {**SMALL, "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0},
    "bart": {
        "vocab_size": 61,
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 48,
    },
}
"""Models about whose attention their class and config say nothing, or the contrary: BART has layers for an
encoder, which it never uses.
"""


def judged(kind: str, **more: Any) -> bool:
    """Returns whether a gradient reaches tokens from logits before them: the judge needs no tolerance, as
    masks give exact zeros.
    """
    config = transformers_lm.config_of({"model_type": kind, **TINY[kind], **more}, None)
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    embedded = model.get_input_embeddings()(torch.randint(3, 61, (1, 20))).detach().requires_grad_()
    model(inputs_embeds=embedded, attention_mask=torch.ones(1, 20), use_cache=False).logits[
        0, :12
    ].square().sum().backward()
    return bool(embedded.grad[0, 12:].abs().max() > 0)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("kind", "more", "fix"),
    [
        ("rembert", {"is_decoder": True}, "set is_decoder = true in config"),
        ("xlm", {"causal": True}, "set causal = true in config"),
        ("xlnet", {"attn_type": "uni"}, "set attn_type = 'uni' in config"),
    ],
)
def test_a_model_that_looks_at_later_tokens_is_refused(kind: str, more: dict[str, Any], fix: str) -> None:
    """It would learn to copy them.  What to set is named only where it helps."""
    assert judged(kind), "the judge"
    with pytest.raises(
        ValueError,
        match=(rf"^this '{kind}' attends to later tokens, so it would only learn to copy them; {fix}$"),
    ):
        transformers_lm.build({"model_type": kind, **TINY[kind]})
    assert not judged(kind, **more), "the judge"
    transformers_lm.build({"model_type": kind, **TINY[kind], **more})


@pytest.mark.fast
def test_a_setting_that_does_not_help_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.models.causal.REMEDIES", ({"is_decoder": True},))
    with pytest.raises(ValueError, match=r"use another model_type, such as 'llama'$"):
        transformers_lm.build({"model_type": "xlm", **TINY["xlm"]})


@pytest.mark.fast
def test_a_decoder_with_layers_that_it_never_uses_is_the_librarys() -> None:
    """BART's decoder alone has attention to an encoder that is not there, and that would not be causal."""
    assert not judged("bart"), "the judge"
    state = torch.get_rng_state()
    ours = transformers_lm.build({"model_type": "bart", **TINY["bart"]}).eval()
    torch.set_rng_state(state)
    theirs = transformers.AutoModelForCausalLM.from_config(
        ours.config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, ours.get_parameter(name)), (
            "the same draws: the check draws none of them"
        )
    tokens = batch()["tokens"].clamp_min(3)
    assert torch.allclose(
        ours(tokens), theirs(input_ids=tokens, use_cache=False).logits, rtol=1e-5, atol=1e-6
    )
    assert len(ours.sharding().blocks) == 2
    assert ours.doubt == ""


@pytest.mark.fast
@pytest.mark.parametrize(
    ("kind", "fix"),
    [
        ("llama", {}),
        ("gemma2", {}),
        ("big_bird", {"is_decoder": True, "attention_type": "original_full"}),
        ("bert", {"is_decoder": True}),
    ],
)
def test_of_a_large_model_a_small_one_is_run(kind: str, fix: dict[str, Any]) -> None:
    """The published sizes of these have up to 9 billion parameters: none of their memory is taken."""
    with torch.device("meta"):
        if fix:
            said = " and ".join(
                f"{name} = {'true' if value is True else repr(value)}" for name, value in fix.items()
            )
            with pytest.raises(ValueError, match=rf"later tokens, .*; set {said} in config$"):
                transformers_lm.build({"model_type": kind})
        assert transformers_lm.build({"model_type": kind, **fix}).doubt == ""


@pytest.mark.fast
def test_a_layer_far_behind_that_looks_ahead_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory of its 32 layers is taken, and the model is built once.  The control: as it is published it
    looks back only.
    """
    config, built = transformers_lm.config_of({"model_type": "llama"}, None), list[nn.Module]()

    def late(config: Any) -> nn.Module:
        model = transformers_lm._made(config)
        for layer in model.model.layers[20:]:
            layer.self_attn.is_causal = False
        built.append(model)
        return model  # type: ignore[no-any-return]

    for make, ahead in ((transformers_lm._made, False), (late, True)):
        monkeypatch.setattr("elastic.models.causal._FOUND", {})
        assert causal.looks_ahead(config, make) is ahead
    assert len(built) == 1 and sum(parameter.numel() for parameter in built[0].parameters()) < 1e7


@pytest.mark.fast
def test_attention_in_sparse_blocks_looks_ahead_though_only_in_long_sequences() -> None:
    """BigBird's blocks have two tokens here, so that 20 are a long sequence.  The control: full attention."""
    decoder = {"is_decoder": True, "block_size": 2, "num_random_blocks": 1}
    assert judged("big_bird", **decoder, attention_type="block_sparse"), "the judge"
    with pytest.raises(
        ValueError,
        match=(
            r"attends to later tokens, .*; set is_decoder = true and attention_type = "
            r"'original_full' in config$"
        ),
    ):
        transformers_lm.build(
            {"model_type": "big_bird", **TINY["big_bird"], **decoder, "attention_type": "block_sparse"}
        )
    assert not judged("big_bird", **decoder, attention_type="original_full"), "the judge"
    transformers_lm.build(
        {"model_type": "big_bird", **TINY["big_bird"], **decoder, "attention_type": "original_full"}
    )


def test_where_no_small_model_runs_its_layers_decide_and_the_user_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("elastic.models.causal.MOST", 0)
    monkeypatch.setattr("elastic.models.causal._FOUND", {})
    with (
        torch.device("meta"),
        pytest.raises(
            ValueError,
            match=(
                r"this 'bart' attends to later tokens, .*; "
                r"set is_decoder = true in config"
            ),
        ),
    ):
        transformers_lm.build({"model_type": "bart", **TINY["bart"]})
    args = {"config": {"model_type": "llama", **GATED}}
    doubts = "whether 'llama' of transformers attends to later tokens could not be tested"
    job = toy_job(tmp_path, model="elastic.models.transformers_lm:build", model_args=args)
    assert any(doubts in note for note in preflight(job).notes)
    monkeypatch.undo()
    assert not any(doubts in note for note in preflight(job).notes)


NOWHERE = ("./nowhere", "/no/where", "a/b/c", "nowhere")
ASKS = """
import sys
from elastic.models.transformers_lm import config_of
for path in sys.argv[1:]:
    try:
        config_of({}, path)
    except ValueError as error:
        print(error, file=sys.stderr)
"""


def test_a_folder_that_is_not_there_is_told_of_before_the_hub_is_asked(tmp_path: Path) -> None:
    """The hub gives nothing here, and is not asked for what can be no name of it.  The control: nothing is
    said of a folder.
    """
    transformers.Qwen3Config(**GATED).save_pretrained(tmp_path)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "empty")}
    command = [sys.executable, "-c", ASKS, str(tmp_path), *NOWHERE]
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    *others, asked, given = ran.stderr.splitlines()
    absent = [f"path = {path!r}: there is no such folder on this machine" for path in NOWHERE]
    assert others == [
        f"{each}, and it is no name of the Hugging Face hub either; name a folder with a config.json"
        for each in absent[:3]
    ]
    assert asked == f"{absent[3]}, so it is read from the Hugging Face hub"
    assert given.startswith(
        f"{absent[3]}, and the Hugging Face hub did not give it; name a folder with a config.json (OSError: "
    )


@pytest.mark.fast
def test_arguments_stay_as_they_are() -> None:
    """They are part of the job, and the library changes a config's tables."""
    config = {"model_type": "llama", **GATED, "rope_parameters": {"rope_theta": 5e5}}
    with torch.device("meta"):
        transformers_lm.build(config)
    assert config == {"model_type": "llama", **GATED, "rope_parameters": {"rope_theta": 5e5}}


@pytest.mark.fast
def test_without_the_library_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "elastic.models.transformers_lm")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CodeError, match=r"transformers 5 is not there .*pip install 'elastic-train\[hf\]'"):
        load("elastic.models.transformers_lm:build", "model")


@pytest.mark.fast
def test_the_version_of_the_library_is_part_of_the_build() -> None:
    assert code_digest(["elastic.models.transformers_lm:build"]) == f"transformers {transformers.__version__}"


@pytest.mark.parametrize(
    "kind", ["gemma3_text", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("qwen3", "mixtral"))]
)
def test_they_train_with_the_same_bits_in_every_layout(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """Promise 1; they learn, and the library loads what is exported."""
    config = {"model_type": kind, **CONFIGS[kind][0], "vocab_size": 29, "pad_token_id": None}
    job = {"model": "elastic.models.transformers_lm:build", "model_args": {"config": config}, "steps": 8}
    runs = [
        train(ranks, toy_job(tmp_path / str(n), **job), layout, 8)
        for n, layout in enumerate((Layout(1, 1), Layout(1, 2)))
    ]
    assert runs[0].hash == runs[1].hash
    assert runs[0].outcomes[-1].loss < 0.9 * runs[0].outcomes[0].loss
    export = tmp_path / "0" / "export-8"
    transformers_lm.config_of(config, None).save_pretrained(export)
    _, told = transformers.AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not any(told.values()), told


@pytest.mark.fast
def test_the_engine_chooses_for_them(tmp_path: Path) -> None:
    """A model that cannot fuse its loss is not told to."""
    for kind in ("qwen3", "phi"):
        model = built(kind)
        apply_kernels(model, torch.device("cpu"), toy_job(tmp_path))
        assert getattr(model, "fuses_loss", None) == (True if kind == "qwen3" else None)
        assert model.attends is Kernel.TORCH
