"""The files by which a launcher and its ranks talk, in a folder of one run."""

#: The launcher's: the jobs as JSON, the device's name, and for a user's own module the module with its batch and its script.
JOBS, DEVICE, MODULE, MAIN = "jobs.json", "device", "module.pt", "main.pickle"
#: The file that the launcher locks as long as it lives.
LIFELINE = "lifeline"
#: A rank's: a line for all that it begins, and the result of each job.
BEAT, RESULT = "beat-{rank}.jsonl", "result-{job}-{rank}.json"
