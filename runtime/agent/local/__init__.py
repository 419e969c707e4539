"""The state machine of a device that runs whole models without a scheduler."""
