"""What a fault, a step and a save cost, beside the limits of the machine and beside other code."""
