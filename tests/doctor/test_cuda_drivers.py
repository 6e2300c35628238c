"""NVIDIA's table of drivers, and the requirements of an image on its driver."""

from __future__ import annotations

import pytest

from launcher.doctor.tool_rules import CudaSupport, cuda_support, fulfils, minimum_driver, version

# The variable of the images of CUDA 12.4, shortened.
REQUIRES = "cuda>=12.4 brand=tesla,driver>=470,driver<471 brand=tesla,driver>=535,driver<536"


@pytest.mark.parametrize(
    ("cuda", "driver"),
    [
        ("13.0.1", (580,)),
        ("12.4.1.003", (525, 60, 13)),
        ("12.0", (525, 60, 13)),
        ("11.8.0", (450, 80, 2)),
        ("10.2.89", (440, 33)),
        ("10.0", (410, 48)),
        ("9.2", None),
        ("14.0", None),
        ("12", None),
        ("", None),
        ("latest", None),
    ],
)
def test_oldest_driver_is_that_of_the_release(cuda: str, driver: tuple[int, ...] | None) -> None:
    assert minimum_driver(cuda) == driver


def test_a_driver_is_compared_by_its_numbers() -> None:
    assert cuda_support("525.60.13", "12.4") == CudaSupport(True, "525.60.13")
    assert cuda_support("525.60.9", "12.4") == CudaSupport(False, "525.60.13")
    assert cuda_support("1000.1", "12.4").runs is True
    assert cuda_support("450.80.02", "11.1") == CudaSupport(True, "450.80.02")
    assert cuda_support("580.65.06", "13.0") == CudaSupport(True, "580")
    assert cuda_support("575.57.08", "13.0") == CudaSupport(False, "580")
    assert cuda_support("550.54.15", "9.2") == CudaSupport(None)


def test_text_without_a_number_is_no_version() -> None:
    assert version(None) == version("") == version("N/A") == ()
    assert version(" 535.104.05 ") == (535, 104, 5)


@pytest.mark.parametrize(
    ("driver", "cuda", "expected"),
    [
        ("550.54.15", "12.4", True),
        ("545.23.08", "12.3", False),  # too old, and in none of the admitted branches
        ("535.161.07", "12.2", True),  # in an admitted branch
        ("536.10", "12.2", False),
        ("470.82.01", "11.4", True),
        ("510.47.03", "11.6", False),
    ],
)
def test_requirements_on_drivers_are_those_of_nvidia_container_cli(
    driver: str, cuda: str, expected: bool
) -> None:
    assert fulfils(driver, cuda, REQUIRES) is expected


def test_unknown_conditions_count_as_fulfilled() -> None:
    assert fulfils("550.54.15", None, "cuda>=12.4")
    assert fulfils("550.54.15", "12.4", "arch>=5.0,cuda>=12.4")
    assert not fulfils("550.54.15", "12.4", "arch>=5.0,cuda>=12.5")
