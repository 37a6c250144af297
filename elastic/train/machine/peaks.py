"""The largest number of operations a second of each device, by torch's name for the device.  The numbers are
from its vendor's data sheet, for dense operations, without sparsity.
"""

from __future__ import annotations

import re

PEAKS = {
    "GB200": (2500e12, 80e12),
    "B200": (2250e12, 75e12),
    "H200 NVL": (835.5e12, 60e12),
    "H200": (989.5e12, 67e12),
    "GH200": (989.5e12, 67e12),
    "H100 NVL": (835.5e12, 60e12),
    "H100 PCIe": (756e12, 51e12),
    "H100": (989.5e12, 67e12),
    "H800": (989.5e12, 67e12),
    "A100": (312e12, 19.5e12),
    "A800": (312e12, 19.5e12),
    "A40": (149.7e12, 37.4e12),
    "A30": (165e12, 10.3e12),
    "A10": (125e12, 31.2e12),
    "L40S": (362e12, 91.6e12),
    "L40": (181e12, 90.5e12),
    "L4": (121e12, 30.3e12),
}
"""Operations a second in bfloat16 (float16 has the same number) and in float32 that is not rounded to TF32.

The first row whose words are all in the name of a device, such as "NVIDIA H100 80GB HBM3", is the row of that
device.
"""


def peak_flops(name: str, precision: str) -> float:
    """Returns the operations a second of the device ``name`` in ``precision`` (a setting of the job); 0 if
    they are not known, as for a part of a device (MIG).
    """
    words = set(re.split(r"[ -]", name))
    found = next((row for key, row in PEAKS.items() if words.issuperset(key.split())), None)
    return found[precision == "fp32"] if found is not None and "MIG" not in words else 0.0
