//! `Sys*` and `ProcessFind`: the machine, as far as a sandbox sees it. A sandbox has no processes, services, logs and networks of the
//! machine, and the outputs say so.

use super::{Args, Output, VerbError, failed};
use crate::tool::shell::confinement::MEMORY;
use crate::tool::shell::path::{Access, WORKSPACE};
use crate::tool::shell::workspace::Workspace;

pub(super) fn run(verb: &str, args: Args<'_>, workspace: &Workspace) -> Option<Output> {
    let done = |text: &str| Ok(text.to_owned());
    let uname = rustix::system::uname;
    Some(match verb {
        "SysPwd" => done(WORKSPACE),
        "SysHostname" => Ok(uname().nodename().to_string_lossy().into_owned()),
        "SysUptime" => Ok(format!("{} seconds", rustix::system::sysinfo().uptime)),
        "SysOsInfo" => {
            let uname = uname();
            let text = |part: &std::ffi::CStr| part.to_string_lossy().into_owned();
            Ok(format!("{} {} {}", text(uname.sysname()), text(uname.release()), text(uname.machine())))
        }
        "SysCpuCount" => Ok(std::thread::available_parallelism().map_or(1, usize::from).to_string()),
        "SysTempDir" => Ok(format!("{WORKSPACE}/tmp (DirCreate makes it; a sandbox has no other temporary directory)")),
        "SysDiskUsage" => disk(args, workspace),
        "SysMemory" => Ok(format!("limit of this sandbox: {MEMORY} bytes")),
        "SysProcessList" => done("a sandbox sees no processes but its own, which runs this script"),
        "ProcessFind" => done("no process: a sandbox sees none but its own, which runs this script"),
        "SysDriveList" => disk(Args(&[]), workspace).map(|usage| format!("{WORKSPACE}: {usage}")),
        "SysNetInfo" => done("no interface: a sandbox has no network but the proxy, through the network verbs"),
        "SysLogSources" => done("no source: a sandbox sees no logs of the machine"),
        "SysLogRead" => failed("a sandbox sees no logs of the machine"),
        "SysServiceList" => done("no service: a sandbox sees none of the machine"),
        "SysServiceStatus" => failed("a sandbox sees no services of the machine"),
        _ => return None,
    })
}

fn disk(args: Args<'_>, workspace: &Workspace) -> Output {
    let path =
        if args.0.is_empty() { Args(&[".".to_owned()]).path(0, Access::Read)? } else { args.path(0, Access::Read)? };
    let stat = workspace.disk(&path)?;
    let of = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
    let (total, free) = (of(stat.f_blocks), of(stat.f_bavail));
    if total == 0 {
        return Err(VerbError::Failed("the file system does not say its size".to_owned()));
    }
    Ok(format!("total: {total} bytes, available: {free} bytes, used: {} bytes", total.saturating_sub(of(stat.f_bfree))))
}
