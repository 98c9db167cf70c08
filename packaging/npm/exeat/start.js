"use strict";
// Starts the binary of this platform's package, passes signals on to it, and ends as it does.
const { spawn } = require("node:child_process");

module.exports = (name) => {
  const platform = `exeat-${process.platform}-${process.arch}`;
  let binary;
  try {
    binary = require.resolve(`${platform}/${name}`);
  } catch {
    console.error(`exeat: there is no package ${platform}; exeat runs on Linux, on x86-64 and 64-bit Arm`);
    process.exit(1);
  }
  const child = spawn(binary, process.argv.slice(2), { stdio: "inherit" });
  for (const signal of ["SIGHUP", "SIGINT", "SIGTERM"]) {
    process.on(signal, () => child.kill(signal));
  }
  child.on("error", (error) => {
    console.error(`exeat: ${binary}: ${error.message}`);
    process.exit(1);
  });
  child.on("exit", (code, signal) => process.exit(signal === null ? code : 128 + require("node:os").constants.signals[signal]));
};
