# SPDX-License-Identifier: Apache-2.0
"""What all tests share."""

from hypothesis import settings

# How long an example takes says how busy the machine is, and nothing about the code.
settings.register_profile("kvpool", deadline=None)
settings.load_profile("kvpool")
