"""The runtime under the tools that people drive training with. One folder a tool; none is imported where it is not used."""
