"""OLMo 3 (Team OLMo, 2025): OLMo 2 with a sliding window on three layers of four, whose rotary
positions are never scaled.
"""

from __future__ import annotations

from octavo.models import olmo2
from octavo.models.family import Family, Windows
from octavo.models.hf_type import FULL, SLIDING, HfType, Rule, layer_types

_TYPES = Rule(
    "sliding but every 4th",
    lambda values: layer_types(values, lambda index: (index + 1) % 4 != 0),
)
FAMILY = Family(
    name="olmo3",
    title="OLMo 3",
    program=olmo2.program,
    modules=olmo2.FAMILY.modules,
    hf=(
        HfType(
            model_type="olmo3",
            classes="Olmo3",
            tokenizer="",
            defaults={
                **olmo2.FAMILY.hf[0].defaults,
                "sliding_window": 4096,
                "layer_types": None,
            },
            computed={**olmo2.FAMILY.hf[0].computed, "layer_types": _TYPES},
            rope_theta={FULL: 5e5, SLIDING: 5e5},
            local_theta="",
        ),
    ),
    architecture="olmo2",
    windows=Windows(period=4, scaled=False),
)
