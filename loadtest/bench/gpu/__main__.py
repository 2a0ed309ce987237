from loadtest.bench.gpu.cli import main

main()
