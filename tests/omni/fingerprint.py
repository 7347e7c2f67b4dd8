"""What a load with the flag off leaves behind, in a process of its own; see `fingerprint`."""

import hashlib
import os
import sys
import types


def function_print(value):
    """Code, defaults and closure of a function, without addresses."""
    code = getattr(value, "__code__", None)
    if code is None:
        return type(value).__qualname__
    consts = [c.co_code.hex() if isinstance(c, types.CodeType) else repr(type(c)) for c in code.co_consts]
    text = repr(
        (code.co_filename, code.co_firstlineno, code.co_code.hex(), code.co_names, consts, code.co_freevars)
    )
    return hashlib.sha256(text.encode()).hexdigest()


def class_prints():
    found = {}
    for module_name, module in sorted(sys.modules.items()):
        if module_name.split(".")[0] not in ("vllm", "vllm_omni"):
            continue
        for name, cls in list(vars(module).items()):
            if not isinstance(cls, type):
                if isinstance(cls, types.FunctionType):
                    found[f"{module_name}.{name}"] = function_print(cls)
                continue
            for member, value in list(vars(cls).items()):
                inner = getattr(value, "__func__", getattr(value, "fget", value))
                found[f"{cls.__module__}.{cls.__qualname__}.{member}"] = function_print(inner)
    return found


def object_print(value, depth=0):
    import torch

    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return [str(value.dtype), list(value.shape), hashlib.sha256(data).hexdigest()]
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, (int, float, str, bool, type(None))):
        kind = repr(value)
    elif hasattr(value, "__code__"):
        kind = function_print(value)
    elif depth < 6 and isinstance(value, dict):
        return {str(key): object_print(item, depth + 1) for key, item in value.items()}
    elif depth < 6 and isinstance(value, (list, tuple)):
        return [object_print(item, depth + 1) for item in value]
    elif depth < 6 and kind.startswith("vllm_omni") and hasattr(value, "__dict__"):
        return {"": kind, **object_print(vars(value), depth + 1)}
    return kind


def fingerprint(_rank, checkpoint, plugins):
    """Load tiny DreamZero with the flag off and those plugins, and run two steps.

    Returns:
        What every class of vLLM-Omni looks like, what the pipeline holds, what came out.
    """
    os.environ["VLLM_PLUGINS"] = plugins
    import numpy as np
    from omni_tiny.inproc import TinyDreamZero

    with TinyDreamZero(checkpoint, capacity=3) as model:
        rng = np.random.default_rng(0)
        outputs = [model.step("a", rng=rng, frames=frames) for frames in (1, 4)]
        flat = {}
        for name, module in model.pipeline.named_modules():
            held = {key: value for key, value in vars(module).items() if key != "od_config"}
            for key, value in held.items():
                flat[f"{name}.{key}"] = object_print(value)
        return {
            "classes": class_prints(),
            "pipeline": flat,
            "output": [[step.actions.tobytes().hex(), object_print(step.video)] for step in outputs],
        }
