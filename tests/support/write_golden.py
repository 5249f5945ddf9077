"""Write the golden case `served` from the definition: python tests/support/write_golden.py. The other cases come from
the reference implementation, which has no such rows."""

import json

import torch
from definition import Case, Loss, define, random_case
from places import GOLDEN
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence

STEPS = 7
# Answers of one token, of two, of more than the steps; at a document's start, at its end and side by side.
ANSWERS = ("0000000000 1111111111111111 000", "1111 0000 11 000000 1 00 11111111111", "000 1111111 0 1111111 000000000")


def golden_case() -> Case:
    masks = [[int(mark) for mark in answers.replace(" ", "")] for answers in ANSWERS]
    sizes = {"hidden_size": 32, "target_hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    return random_case(masks, 7, **sizes, vocab_size=128, draft_vocab_size=64, rows="served")


def main() -> None:
    case, folder = golden_case(), GOLDEN / "served"
    columns = {
        "input_ids": [document.ids for document in case.documents],
        "loss_mask": [document.loss_mask.long() for document in case.documents],
        "attention_mask": [torch.ones_like(document.ids) for document in case.documents],
        "aux_hidden_state": [document.aux for document in case.documents],
        "hidden_state": [document.last for document in case.documents],
    }
    inputs = {name: pad_sequence(rows, batch_first=True) for name, rows in columns.items()}
    tokens = inputs["attention_mask"].numel()
    defined = define(case, STEPS, Loss(divide_by=tokens))
    expected = {
        "loss": defined.loss[None],
        "ploss": defined.step_losses,
        "acc_correct": defined.correct,
        "acc_denom": defined.supervised.double(),
        "acceptance_rate": defined.acceptance,
        "position_count": defined.counted.double(),
    }
    expected |= {f"grad.{name}": gradient.float() for name, gradient in defined.gradients.items()}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case.config.to_json("float32"), indent=1) + "\n")
    save_file(case.weights | {"d2t": case.d2t, "t2d": case.t2d}, folder / "draft.safetensors")
    save_file(inputs | {"lm_head_weight": case.target_head}, folder / "inputs.safetensors", {"rows": case.rows})
    save_file(expected, folder / "expected.safetensors")


if __name__ == "__main__":
    main()
