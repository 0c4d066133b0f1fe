// Talks to a prefixcache server with what any Node program has: @grpc/grpc-js and the .proto files. No generated code.
//
//   npm ci
//   node client.js services
//   node client.js health
//   node client.js chat "Name three rivers of Europe."
//   node client.js generate '{"text": "Once upon a time", "max_tokens": 20}'
//
// The server's address comes from PREFIXCACHE_ADDRESS; without it, 127.0.0.1:50051.

import { createRequire } from "node:module";
import path from "node:path";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const packageFolder = (name) => path.dirname(createRequire(import.meta.url).resolve(`${name}/package.json`));

// The protocols of health checks and reflection come with the packages of the gRPC project.
const PROTO_FOLDERS = [
  fileURLToPath(new URL("../../protos", import.meta.url)),
  path.join(packageFolder("grpc-health-check"), "proto"),
  path.join(packageFolder("@grpc/reflection"), "build/proto"),
];
const PROTO_FILES = [
  "prefixcache/v1/inference.proto",
  "health/v1/health.proto",
  "grpc/reflection/v1alpha/reflection.proto",
];

/** Connects to a server, without TLS; the fields keep the names that they have in the .proto files. */
function connect(address) {
  const definition = loader.loadSync(PROTO_FILES, {
    includeDirs: PROTO_FOLDERS,
    keepCase: true,
    longs: Number,
    enums: String,
    oneofs: true,
  });
  const packages = grpc.loadPackageDefinition(definition);
  const credentials = grpc.credentials.createInsecure();
  return {
    inference: new packages.prefixcache.v1.Inference(address, credentials),
    health: new packages.grpc.health.v1.Health(address, credentials),
    reflection: new packages.grpc.reflection.v1alpha.ServerReflection(address, credentials),
  };
}

/** Prints the names of all services, one a line. */
async function services({ reflection }) {
  const call = reflection.ServerReflectionInfo();
  call.end({ list_services: "" });
  for await (const answer of call) {
    for (const service of answer.list_services_response.service) {
      console.log(service.name);
    }
  }
}

/** Prints whether the server can take requests: SERVING or NOT_SERVING. */
async function health({ health }) {
  const request = { service: "prefixcache.v1.Inference" };
  const answer = await new Promise((resolve, reject) => {
    health.Check(request, (error, reply) => (error ? reject(error) : resolve(reply)));
  });
  console.log(answer.status);
}

/** Prints each message of a Generate call as one line of JSON. */
async function generate({ inference }, requestJson) {
  for await (const message of inference.Generate(JSON.parse(requestJson))) {
    console.log(JSON.stringify(message));
  }
}

/** Prints the answer to one question as it comes, then how much of the prompt was cached. */
async function chat({ inference }, question) {
  const request = { messages: [{ role: "user", content: question }], temperature: 0 };
  let usage;
  for await (const message of inference.Generate(request)) {
    process.stdout.write(message.text ?? "");
    usage = message.usage ?? usage;
  }
  console.log(`\n${usage.cached_tokens ?? 0} of ${usage.prompt_tokens} prompt tokens were cached`);
}

const COMMANDS = { services, health, generate, chat };
const [name, argument] = process.argv.slice(2);
const command = COMMANDS[name];
if (command === undefined || (command.length > 1 && argument === undefined)) {
  console.error("usage: node client.js services | health | chat QUESTION | generate REQUEST_AS_JSON");
  process.exit(2);
}
const stubs = connect(process.env.PREFIXCACHE_ADDRESS ?? "127.0.0.1:50051");
try {
  await command(stubs, argument);
} catch (error) {
  // such as `INVALID_ARGUMENT: temperature: …`; the request's id in the server's log is in the trailing metadata
  console.error(`${grpc.status[error.code] ?? error.name}: ${error.details ?? error.message}`);
  process.exitCode = 1;
} finally {
  Object.values(stubs).forEach((stub) => stub.close());
}
