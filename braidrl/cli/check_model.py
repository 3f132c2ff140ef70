"""`braid check MODEL`: properties measured on a tiny model of the same structure, one per line, with the figure and its
bound.

ok      packed rows equal rows alone: log-probs       4.8e-07   (bound 2.0e-04)
REFUSED pipeline ranks equal one                  its layers take the ids of the tokens
"""

from collections.abc import Callable
from pathlib import Path

from braidrl.engines.vllm_proof import vllm_finding
from braidrl.errors import first_line
from braidrl.training.acceptance import OPTIONAL, all_findings, layout_findings
from braidrl.training.decoders.image_proof import image_finding
from braidrl.training.decoders.proof import FAILURES, Finding, Refusal, Twin, proof_device, quietly, unexercised
from braidrl.training.loading import check_model, unused_weights
from braidrl.training.pretrained import config_of

WIDTH = 52


def check(model: str, layouts: bool, say: Callable[[str], None], vllm: Path | None = None) -> bool:
    """Print a model's table; return True if it may train.

    A run that needs an optional property that fails is refused. `layouts` also starts two ranks for each layout;
    `vllm`, an interpreter that has it, compares with vLLM. Raises UserError if there is no model.
    """
    config = config_of(model)
    try:
        with quietly():
            twin = Twin(config, device=proof_device())
            plan, findings = all_findings(twin)
    except Refusal as refusal:
        say(f"REFUSED {model}, {config.model_type}: {refusal}")
        return False
    except FAILURES as error:
        say(f"REFUSED {model}, {config.model_type}: a tiny model of its structure fails: {first_line(error)}")
        return False
    say(f"{model}: {config.model_type}, {plan}")
    for finding in findings:
        say(line(finding))
    with quietly():
        unseen = unexercised(config)
    for name in unseen:
        switch = f"{name}={getattr(config.get_text_config(), name)}"
        say(f"unseen  {switch:{WIDTH}} changes nothing in a tiny model")
    with quietly():
        more = [*layout_findings(twin, plan)] if layouts else []
        if getattr(config, "vision_config", None) is not None:
            more.append(image_finding(twin, plan)[0])
        more += [vllm_finding(config, plan, vllm, Path(model).expanduser())] if vllm is not None else []
    for finding in more:
        say(line(finding))
    if Path(model).is_dir() and any(Path(model).glob("*.safetensors")):
        check_model(model)
        if unused := unused_weights(model):
            say(f"unread  {len(unused)} tensors of its files are in no model of this type: {', '.join(unused[:2])} ...")
        say(f"ok      {'its weight files: all tensors, and their shapes':{WIDTH}}")
    return all(finding.holds or finding.name in OPTIONAL for finding in findings)


def line(finding: Finding) -> str:
    if finding.note:
        return f"REFUSED {finding.name:{WIDTH}} {finding.note}"
    verdict = "ok      " if finding.holds else "WRONG   "
    return f"{verdict}{finding.name:{WIDTH}} {finding.value:.1e}   (bound {finding.bound:.1e})"
