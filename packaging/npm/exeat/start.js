"use strict";
// Starts the binary of this platform's package, passes signals on to it, and ends as it does. That package is installed beside
// this one: as a dependency it would be asked for by its name in the public registry, where it does not exist.
const { spawn } = require("node:child_process");

module.exports = (name) => {
  const platform = `exeat-${process.platform}-${process.arch}`;
  let binary;
  try {
    binary = require.resolve(`${platform}/${name}`);
  } catch {
    console.error(`exeat: the package ${platform} is not installed; there is one for Linux, on x86-64 and on 64-bit Arm`);
    process.exit(1);
  }
  const child = spawn(binary, process.argv.slice(2), { stdio: "inherit" });
  // A terminal signals the binary itself, and a second SIGINT would stop it at once.
  const isSignalled = (signal) => process.stdin.isTTY === true && signal !== "SIGTERM";
  for (const signal of ["SIGHUP", "SIGINT", "SIGTERM"]) {
    process.on(signal, () => isSignalled(signal) || child.kill(signal));
  }
  child.on("error", (error) => {
    console.error(`exeat: ${binary}: ${error.message}`);
    process.exit(1);
  });
  child.on("exit", (code, signal) => process.exit(signal === null ? code : 128 + require("node:os").constants.signals[signal]));
};
