# SPDX-License-Identifier: Apache-2.0
"""What all tests share."""

import signal

from hypothesis import settings

# How long an example takes says how busy the machine is, and nothing about the code.
settings.register_profile("kvpool", deadline=None)
settings.load_profile("kvpool")

# Shells let what they start in the background ignore Ctrl-C, and it would hand that on to the programs under test.
signal.signal(signal.SIGINT, signal.default_int_handler)
