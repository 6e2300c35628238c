"""Seeds for the random draws of a sample: pure functions, so that nothing has to be stored or replayed.

All of it is 64-bit integer arithmetic: the same on every machine and in every version of numpy.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1

# The data generation of held-out samples: training counts its generations from 0 upwards.
HELDOUT = _MASK


def mix(value: int) -> int:
    """Return SplitMix64's finalizer of a number (Steele et al. 2014, "Fast splittable ..."), 64 bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def sample_seed(seed: int, generation: int, sample: int) -> int:
    """Return the 64-bit seed of all that is drawn for one sample, such as mock tokens or T5's masked spans.

    Parameters
    ----------
    seed
        The run's (``model.seed``).
    generation
        The data generation: another one draws everything anew. `HELDOUT` for validation.
    sample
        The sample's number in the run.
    """
    key = mix(seed & _MASK)
    for number in (generation, sample):
        # Not mixed itself: equal seed and number would cancel out.
        key = mix(key ^ (number & _MASK))
    return key


def order_seed(seed: int, generation: int, source: int) -> int:
    """Return the seed of the order of a source's windows.

    The first source of the first generation takes the run's seed itself.
    """
    return seed if generation == source == 0 else sample_seed(~seed, generation, source)
