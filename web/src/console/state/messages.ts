// The relay's messages as text, and where its WebSocket is.

export interface Message {
  readonly type: string;
  readonly subscription_id?: string;
  readonly client_msg_id?: string;
  readonly packet?: Readonly<Record<string, unknown>>;
  readonly text?: string;
  readonly received_at?: number;
  readonly cursor?: string;
  readonly relay_annotations?: Readonly<Record<string, unknown>>;
  readonly complete?: boolean;
  readonly code?: string;
  readonly reason?: string;
  readonly detail?: string;
  readonly retry_after?: number;
  readonly challenge?: string;
  readonly server_id?: string;
  readonly expires_at?: number;
  readonly author_id?: string;
  readonly capabilities?: readonly string[];
  readonly packet_id?: string;
  readonly duplicate?: boolean;
  readonly changed?: boolean;
  readonly entries?: readonly Readonly<Record<string, unknown>>[];
  readonly next?: string;
  readonly total?: number;
  readonly silent?: number;
}

const PACKET = ',"packet":';
const BEHIND = ',"received_at":';

/** Decode one frame; null for what is no message. An EVENT gets the `text` of its packet. */
export function readMessage(frame: string): Message | null {
  let message: Message;
  try {
    message = JSON.parse(frame) as Message;
  } catch {
    return null;
  }
  if (typeof message !== "object" || message === null || typeof message.type !== "string") return null;
  if (message.type !== "EVENT") return message;
  const { packet } = message;
  if (typeof packet !== "object" || packet === null) return null;
  return Object.assign(message, { text: packetText(frame) ?? JSON.stringify(packet) });
}

/** The packet's own bytes, as relayd writes an EVENT: its id and signature are over these and no others. */
function packetText(frame: string): string | null {
  const start = frame.indexOf(PACKET);
  const end = frame.lastIndexOf(BEHIND);
  return start < 0 || end < start ? null : frame.slice(start + PACKET.length, end);
}

function setting(name: string): string {
  return document.querySelector<HTMLMetaElement>(`meta[name="strata-${name}"]`)?.content ?? "";
}

/** The relay's public URL where this page came by that name, else the path beside the page. */
export function openingUrl(): string {
  const here = new URL(setting("socket"), new URL(".", location.href));
  here.protocol = location.protocol === "https:" ? "wss:" : "ws:";
  const publicUrl = setting("public");
  if (publicUrl && new URL(publicUrl).host === location.host) return publicUrl;
  return here.href;
}
