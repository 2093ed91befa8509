"""A small ZeRO runtime whose memory is what the plan says."""
