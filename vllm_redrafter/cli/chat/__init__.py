# SPDX-License-Identifier: Apache-2.0
"""`vllm-redrafter chat`: talk to a server and see what its drafter guessed."""
