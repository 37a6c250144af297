"""Lists what a member holds at the start of a world, for its log: memory by class, and the parameters whose
weights decay.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from torch import Tensor

from elastic.engine.optim.groups import table_of
from elastic.job import Job
from elastic.plan.copy_budget import amount
from elastic.train.model import BUFFERS, State


def memory_by_class(state: State) -> dict[str, int]:
    """Returns the bytes of the live memory of each class.  Call it after a backward pass, while gradients
    exist.

    Memory that several tensors share counts once, in the first of their classes.  What comes and goes in a
    step, such as activations and gathered parameters, is in no class.
    """
    values, seen = state.shard.values, set[int]()
    where = off_device(state.job)
    classes: dict[str, Iterable[Tensor]] = {
        f"weights{where}": [value for (kind, _), value in values.items() if kind == "parameter"],
        f"moments{where}": [value for (kind, _), value in values.items() if kind.startswith("moment.")],
        "gradients": state.parameters.grads().values(),
        f"computing copies{where if state.job.offload == 'weights' else ''}": state.parameters.copies,
        "buffers": [value for (kind, _), value in values.items() if kind in BUFFERS],
    }
    return {name: _bytes(tensors, seen) for name, tensors in classes.items()}


def off_device(job: Job) -> str:
    """Returns the words that say where state is that is not on the device, to follow the name of its class;
    "" if all state is on the device.
    """
    return (
        f" in files of {job.offload_folder}"
        if job.offload_folder
        else " in host memory"
        if job.offloads
        else ""
    )


def _bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Returns the bytes of the memory of ``tensors`` whose address is not in ``seen``, and adds the addresses
    to ``seen``.
    """
    found = 0
    for tensor in tensors:
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            found += tensor.nbytes
    return found


def memory_line(classes: Mapping[str, int]) -> str:
    return f"it holds {', '.join(f'{amount(size)} of {name}' for name, size in classes.items() if size)}"


def decay_line(state: State) -> str:
    """Returns a line that says for which parameters weights decay; ``*`` stands for the numbers of like
    layers.

    If the job has groups of parameters, it returns their table.
    """
    parts, settings = state.optimizer.parts.values(), state.job.optim
    if settings.groups:
        return "\n".join(
            table_of(settings, ((part.group, part.decays, math.prod(part.shape)) for part in parts))
        )
    told = [
        _told([part.name for part in parts if part.decays is decays], words)
        for decays, words in ((True, ("decays", "decay")), (False, ("does not", "do not")))
    ]
    return f"weight decay {settings.weight_decay:g} ({settings.decay}): {', '.join(filter(None, told))}"


def _told(names: list[str], words: tuple[str, str]) -> str:
    """Returns how many parameters there are, the verb, and their names; "" without any.  ``words`` are (the
    verb for one parameter, the verb for several).
    """
    patterns = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name, count=1) for name in names)
    what = f"1 parameter {words[0]}" if len(names) == 1 else f"{len(names)} parameters {words[1]}"
    return f"{what} ({', '.join(patterns)})" if names else ""
