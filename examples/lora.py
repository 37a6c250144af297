"""LoRA (Hu and others 2021) for a language model of transformers: its weights stay as they are, and small matrices beside them learn.

    pip install 'elastic-train[hf]' peft
    hf download Qwen/Qwen3-0.6B --local-dir qwen      # on every node
    elastic train lora.toml

``path`` is a folder with a ``config.json`` and ``*.safetensors``.  The weights are read from there when the run begins.
"""

from peft import LoraConfig, inject_adapter_in_model

from elastic.models import transformers_lm


def build(path, rank=8, alpha=16, targets=("q_proj", "v_proj")):
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets))
    model = inject_adapter_in_model(config, transformers_lm.build(path=path))  # freezes all else
    return transformers_lm.with_weights(model, path, name_in_files)


def name_in_files(name):  # peft moves a weight that it adapts into base_layer; adapters are in no file
    return "" if ".lora_" in name else name.replace(".base_layer.", ".")
